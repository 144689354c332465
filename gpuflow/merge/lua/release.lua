-- Release: a caller whose run is gone runs by itself, by its own message. For what no step of the normal flow leaves behind.
--
-- KEYS[1] record of the caller  KEYS[2] its events  KEYS[3] gpuflow.ready  KEYS[4] gpuflow.merge
-- ARGV[1] id of the caller  ARGV[2] cap of the event stream  ARGV[3] doorbell token seconds  ARGV[4] new delivery tag
-- ARGV[5], ARGV[6] the message that the caller of this has seen, and the same with the new tag, signed; without them,
-- nothing is signed
--
-- Returns 1 released, 0 it waits for a run that there is, or has ended.
local state, run, call, list, message, queue, requirement, pause = unpack(redis.call('HMGET', KEYS[1],
  'state', 'run', 'call', 'list', 'message', 'queue', 'requirement', 'fallback_seconds'))
if state ~= 'MERGED' or not message then return 0 end
local prefix = prefix_of(KEYS[3])
if redis.call('EXISTS', prefix .. 'task:' .. run) == 1 then return 0 end
if ARGV[5] then
  if message ~= ARGV[5] then return 0 end
  use_signature_of(KEYS[3], message)
  message = ARGV[6]
end
redis.call('SREM', prefix .. 'merge:' .. run .. ':callers:' .. call, ARGV[1])
local seconds = clock()
-- Its message may be on its way to fetch a result: that delivery begins nothing (start.lua).
local old = cjson.decode(message)['properties']['delivery_tag']
local from, to = string.find(message, old, 1, true)
message = string.sub(message, 1, from - 1) .. ARGV[4] .. string.sub(message, to + 1)
redis.call('HSET', KEYS[1], 'state', 'QUEUED', 'message', message, 'updated_at', seconds)
redis.call('HDEL', KEYS[1], 'run', 'call', 'fetches')
tell(KEYS[2], ARGV[2], {event = 'state', state = 'QUEUED', after = 'released'})
if pause then fall_back_in(KEYS[3], ARGV[1], pause) end
if queue and requirement then register(KEYS[3], queue, requirement, seconds) end
put(KEYS[3], list, 'back', message, ARGV[3])
redis.call('HINCRBY', KEYS[4], 'released', 1)
return 1
