-- Cancel a task: at once while it waits, by request while it runs.
--
-- KEYS[1] task record  KEYS[2] events
-- ARGV[1] reason  ARGV[2] cap of the event stream
--
-- Returns {verdict, state}: 'cancelled' (it waited; its message is taken from its list in the same step),
-- 'requested' (its worker stops it), 'final' (it has ended already), 'unknown'.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'unknown', ''} end
if is_final(state) then return {'final', state} end
local now = redis.call('TIME')
local seconds = string.format('%d.%06d', now[1], now[2])
if state == 'STARTING' or state == 'RUNNING' then
  redis.call('HSET', KEYS[1], 'cancel_requested', seconds)
  return {'requested', state}
end
local list, message = unpack(redis.call('HMGET', KEYS[1], 'list', 'message'))
if list and message then redis.call('LREM', list, 1, message) end
local error = cjson.encode({type = 'Cancelled', message = ARGV[1], retryable = false})
redis.call('HSET', KEYS[1], 'state', 'CANCELLED', 'finished_at', seconds, 'updated_at', seconds, 'error', error)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'event', cjson.encode({event = 'state', state = 'CANCELLED'}))
return {'cancelled', 'CANCELLED'}
