-- Forget a dead task: its record, its events, and how its attempts went.
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] attempts of the task  KEYS[4] gpuflow.dead  KEYS[5] gpuflow.tasks
-- KEYS[6] gpuflow.audit
-- ARGV[1] task id  ARGV[2] who acts
--
-- Returns 1 forgotten, 0 it is not among the dead letters.
if redis.call('ZREM', KEYS[4], ARGV[1]) == 0 then return 0 end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[5], ARGV[1])
audit(KEYS[6], 'task.purge', ARGV[2], 'task:' .. ARGV[1])
return 1
