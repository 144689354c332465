-- Forget a demand queue that nobody uses: nothing waits in it, and nothing was published to it for long.
--
-- KEYS[1] gpuflow.ready  KEYS[2] gpuflow.queues  KEYS[3] queue:<name>  KEYS[4] queue:<name>:classes
-- ARGV[1] queue name  ARGV[2] least seconds since its last use
--
-- Returns 1 forgotten, 0 it is used. The caller makes sure that no unfinished record names it.
local now = redis.call('TIME')
local used = tonumber(redis.call('HGET', KEYS[3], 'used_at') or '0')
if now[1] + now[2] / 1000000 - used < tonumber(ARGV[2]) then return 0 end
refresh(KEYS[1], ARGV[1])
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[3], KEYS[4])
return 1
