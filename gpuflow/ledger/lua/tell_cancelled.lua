-- Store Celery's entry of a task that was cancelled, and tell who waits for it: unless it was queued again since.
--
-- KEYS[1] task record  KEYS[2] Celery's result, and the channel of its name  KEYS[3] gpuflow.untold
-- ARGV[1] the entry  ARGV[2] seconds until it expires, 0: never  ARGV[3] id of the task
--
-- Returns 1, or 0 where the task is cancelled no more. May be done again.
redis.call('ZREM', KEYS[3], ARGV[3])
if redis.call('HGET', KEYS[1], 'state') ~= 'CANCELLED' then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
if tonumber(ARGV[2]) > 0 then redis.call('EXPIRE', KEYS[2], ARGV[2]) end
redis.call('PUBLISH', KEYS[2], ARGV[1])
return 1
