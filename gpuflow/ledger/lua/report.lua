-- Report events of a running attempt and learn what is asked of it.
--
-- KEYS[1] task record  KEYS[2] events
-- ARGV[1] attempt  ARGV[2] progress JSON or ''  ARGV[3] cap of the event stream  ARGV[4..] event JSON
--
-- Returns 'ok', 'cancel' (stop the child), or 'superseded' (another attempt is current, or the record is final:
-- nothing was written).
local state, attempt = unpack(redis.call('HMGET', KEYS[1], 'state', 'attempt'))
if attempt ~= ARGV[1] or (state ~= 'STARTING' and state ~= 'RUNNING') then return 'superseded' end
local now = redis.call('TIME')
local seconds = string.format('%d.%06d', now[1], now[2])
if state == 'STARTING' then
  redis.call('HSET', KEYS[1], 'state', 'RUNNING')
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'event',
    cjson.encode({event = 'state', state = 'RUNNING', attempt = tonumber(attempt)}))
end
redis.call('HSET', KEYS[1], 'updated_at', seconds)
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'progress', ARGV[2]) end
for i = 4, #ARGV do redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'event', ARGV[i]) end
if redis.call('HEXISTS', KEYS[1], 'cancel_requested') == 1 then return 'cancel' end
return 'ok'
