-- Forget the messages that nobody could read or run.
--
-- KEYS[1] gpuflow.unreadable  KEYS[2] gpuflow.audit  ARGV[1] who acts
--
-- Returns how many there were.
local count = redis.call('LLEN', KEYS[1])
if count == 0 then return 0 end
redis.call('DEL', KEYS[1])
audit(KEYS[2], 'messages.purge', ARGV[1], 'messages:unreadable', 'count', count)
return count
