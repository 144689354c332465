-- Regroup: callers of one call of a run that has ended get a run of their own, which answers that call alone. A step moves
-- some of them; the first one makes the run.
--
-- KEYS[1] record of the run that has ended  KEYS[2] its callers of the call  KEYS[3] gpuflow.ready  KEYS[4] gpuflow.tasks
-- KEYS[5] gpuflow.unfinished  KEYS[6] gpuflow.delayed  KEYS[7] gpuflow.parked  KEYS[8] gpuflow.merge
-- ARGV[1] id of that run  ARGV[2] id of the new one, made from it: a repeat finds it  ARGV[3] digest of the call
-- ARGV[4] message of the new run  ARGV[5] hints, '' in a plain queue  ARGV[6] its list  ARGV[7] spec of the call, JSON
-- ARGV[8] fields of its record, JSON object of strings  ARGV[9] seconds before it is taken  ARGV[10] doorbell token seconds
-- ARGV[11] its delivery tag  ARGV[12] cap of the event streams  ARGV[13..] callers
--
-- A caller that waits for that run no more is taken out. Returns {moved, state}: how many have moved, and the state of the
-- new run ('' for none), which may have ended already.
local prefix = prefix_of(KEYS[3])
local record, keys = prefix .. 'task:' .. ARGV[2], prefix .. 'merge:' .. ARGV[2] .. ':'
local moved = {}
for i = 13, #ARGV do
  local state, of = unpack(redis.call('HMGET', prefix .. 'task:' .. ARGV[i], 'state', 'run'))
  if state == 'MERGED' and of == ARGV[1] then moved[#moved + 1] = ARGV[i] end
  redis.call('SREM', KEYS[2], ARGV[i])
end
local state = redis.call('HGET', record, 'state')
if #moved == 0 then return {0, state or ''} end
local seconds = clock()

local function begin_run()
  local message = ARGV[5] ~= '' and stamped(ARGV[4], seconds, ARGV[5]) or ARGV[4]
  local flat = {}
  for name, value in pairs(cjson.decode(ARGV[8])) do flat[#flat + 1], flat[#flat + 2] = name, value end
  redis.call('HSET', record, 'id', ARGV[2], 'created_at', seconds, 'updated_at', seconds, 'message', message,
    'list', ARGV[6], unpack(flat))
  redis.call('ZADD', KEYS[4], seconds, ARGV[2])
  redis.call('SADD', KEYS[5], ARGV[2])
  redis.call('HSET', keys .. 'calls', ARGV[3], ARGV[7])
  redis.call('XADD', prefix .. 'events:' .. ARGV[2], '*', 'event',
    cjson.encode({event = 'state', state = 'QUEUED', after = 'regrouped'}))
  redis.call('HINCRBY', KEYS[8], 'regrouped', 1)
  local fallback, pause = redis.call('HGET', record, 'fallback_seconds'), tonumber(ARGV[9])
  if fallback then fall_back_in(KEYS[3], ARGV[2], fallback) end
  if pause > 0 then
    redis.call('HSET', record, 'not_before', string.format('%.6f', seconds + pause))
    delay(KEYS[3], KEYS[6], KEYS[7], ARGV[11], 'back', ARGV[6], message, pause, ARGV[10])
  else
    put(KEYS[3], ARGV[6], 'back', message, ARGV[10])
  end
  local held = redis.call('GET', prefix .. 'merge:call:' .. ARGV[3])
  if not held or held == ARGV[1] then redis.call('SET', prefix .. 'merge:call:' .. ARGV[3], ARGV[2]) end
end

if not state then begin_run() end
for _, id in ipairs(moved) do
  redis.call('HSET', prefix .. 'task:' .. id, 'run', ARGV[2], 'updated_at', seconds)
  redis.call('HDEL', prefix .. 'task:' .. id, 'fetches')
  redis.call('SADD', keys .. 'callers:' .. ARGV[3], id)
  tell(prefix .. 'events:' .. id, ARGV[12],
    {event = 'state', state = 'MERGED', run = ARGV[2], call = ARGV[3], how = 'regrouped'})
end
return {#moved, state or 'QUEUED'}
