-- End a pipeline: SUCCEEDED, FAILED or CANCELLED. Compare-and-set on RUNNING, in the round that was looked at.
-- The records of its tasks, which were kept for it, expire with it.
--
-- KEYS[1] pipeline record  KEYS[2] stages hash  KEYS[3] events of the pipeline  KEYS[4] gpuflow.audit
-- ARGV[1] final state  ARGV[2] error JSON or ''  ARGV[3] cap of the event stream
-- ARGV[4] seconds until the records expire  ARGV[5] epoch of the round, or '' for whatever round it is in
-- ARGV[6] id of this call  ARGV[7] who acts
-- ARGV[8..] names of all stages; on CANCELLED those that have not ended become CANCELLED in the same step
--
-- Returns 1 ended now, 0 it had ended before, or was resumed since.
if answer_to(KEYS[1], 'end', ARGV[6]) then return 1 end
local state, round = unpack(redis.call('HMGET', KEYS[1], 'state', 'epoch'))
if state ~= 'RUNNING' or (ARGV[5] ~= '' and round ~= ARGV[5]) then return 0 end
local now = redis.call('TIME')
local seconds = string.format('%d.%06d', now[1], now[2])
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'finished_at', seconds)
-- Its signature is used: a record that is put back begins nothing (signatures.py).
use_signature_of(KEYS[4], redis.call('HGET', KEYS[1], 'signature'))
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'error', ARGV[2]) end
if ARGV[1] == 'CANCELLED' then
  local epoch = tonumber(round)
  for i = 8, #ARGV do
    local stored = redis.call('HGET', KEYS[2], ARGV[i])
    local record = stored and cjson.decode(stored) or {name = ARGV[i], state = 'PENDING', epoch = epoch}
    if record['state'] == 'PENDING' or record['state'] == 'DISPATCHED' then
      record['state'] = 'CANCELLED'
      record['finished_at'] = tonumber(seconds)
      redis.call('HSET', KEYS[2], ARGV[i], cjson.encode(record))
    end
  end
end
local event = {event = 'state', state = ARGV[1]}
if ARGV[2] ~= '' then event['error'] = cjson.decode(ARGV[2]) end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'event', cjson.encode(event))
for i = 1, 3 do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
each_task(KEYS[2], KEYS[3], function(record, key)
  -- One that still runs gets its time with its own end.
  if redis.call('HEXISTS', record, 'finished_at') == 1 then redis.call('EXPIRE', key, ARGV[4]) end
end)
local target = 'pipeline:' .. string.match(KEYS[1], '[^:]*$')
if ARGV[1] == 'CANCELLED' then audit(KEYS[4], 'pipeline.cancel', ARGV[7], target) end
audit(KEYS[4], 'pipeline.end', ARGV[7], target, 'state', ARGV[1])
note_answer(KEYS[1], 'end', ARGV[6], ARGV[1])
return 1
