-- Note how far a schedule has come, unless it was removed meanwhile.
--
-- KEYS[1] gpuflow.schedules  KEYS[2] gpuflow.schedules.runs
-- ARGV[1] name  ARGV[2] its last run, JSON
--
-- The same call again changes nothing. Returns 1, or 0: there is no such schedule.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
