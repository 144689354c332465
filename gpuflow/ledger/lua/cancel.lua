-- Cancel a task: at once while it waits, by request while it runs.
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] attempts of the task  KEYS[4] gpuflow.dead
-- KEYS[5] gpuflow.delayed  KEYS[6] gpuflow.parked  KEYS[7] gpuflow.unfinished  KEYS[8] gpuflow.ready
-- ARGV[1] reason  ARGV[2] cap of the event stream  ARGV[3] seconds until a final record expires
--
-- Returns {verdict, state}: 'cancelled' (it waited; its message is taken away in the same step), 'requested' (its
-- worker stops it), 'final' (it has ended already), 'unknown'.
local state, list, message = unpack(redis.call('HMGET', KEYS[1], 'state', 'list', 'message'))
if not state then return {'unknown', ''} end
if is_final(state) then return {'final', state} end
local seconds = clock()
if runs(state) then
  redis.call('HSET', KEYS[1], 'cancel_requested', seconds)
  return {'requested', state}
end
if list and message then
  take_out(KEYS[8], list, message)
  local tag = cjson.decode(message)['properties']['delivery_tag']
  redis.call('ZREM', KEYS[5], tag)
  redis.call('HDEL', KEYS[6], tag)
end
local error = cjson.encode({type = 'Cancelled', message = ARGV[1], retryable = false})
finish(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[7], ARGV[2], ARGV[3], seconds, 'CANCELLED', error)
return {'cancelled', 'CANCELLED'}
