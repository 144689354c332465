-- REPLACE: end a task that another one replaces under its id: its record goes, and the id is free for the next publish.
-- By the current attempt only. Compare-and-set. Its events go with it.
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] attempts of the task  KEYS[4] gpuflow.tasks  KEYS[5] gpuflow.unfinished
-- ARGV[1] task id  ARGV[2] attempt  ARGV[3] owner token
--
-- Returns 'replaced'; 'cancel' (a user has asked for it: commit CANCELLED instead); 'refused': nothing was changed.
local state, attempt, token = unpack(redis.call('HMGET', KEYS[1], 'state', 'attempt', 'owner_token'))
if not state or not runs(state) or attempt ~= ARGV[2] or token ~= ARGV[3] then return 'refused' end
if redis.call('HEXISTS', KEYS[1], 'cancel_requested') == 1 then return 'cancel' end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('SREM', KEYS[5], ARGV[1])
return 'replaced'
