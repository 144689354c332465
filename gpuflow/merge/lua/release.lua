-- Release: a caller whose run is gone runs by itself, by its own message. For what no step of the normal flow leaves behind.
--
-- KEYS[1] record of the caller  KEYS[2] its events  KEYS[3] gpuflow.ready  KEYS[4] gpuflow.merge
-- ARGV[1] id of the caller  ARGV[2] cap of the event stream  ARGV[3] doorbell token seconds  ARGV[4] new delivery tag
--
-- Returns 1 released, 0 it waits for a run that there is, or has ended.
local state, run, list, message, queue, requirement = unpack(redis.call('HMGET', KEYS[1],
  'state', 'run', 'list', 'message', 'queue', 'requirement'))
if state ~= 'MERGED' or not message then return 0 end
if redis.call('EXISTS', prefix_of(KEYS[3]) .. 'task:' .. run) == 1 then return 0 end
local seconds = clock()
local old = cjson.decode(message)['properties']['delivery_tag']
local from, to = string.find(message, old, 1, true)
message = string.sub(message, 1, from - 1) .. ARGV[4] .. string.sub(message, to + 1)
redis.call('HSET', KEYS[1], 'state', 'QUEUED', 'message', message, 'updated_at', seconds)
redis.call('HDEL', KEYS[1], 'run', 'call', 'fetches')
tell(KEYS[2], ARGV[2], {event = 'state', state = 'QUEUED', after = 'released'})
if queue and requirement then register(KEYS[3], queue, requirement, seconds) end
put(KEYS[3], list, 'back', message, ARGV[3])
redis.call('HINCRBY', KEYS[4], 'released', 1)
return 1
