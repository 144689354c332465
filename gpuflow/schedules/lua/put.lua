-- Keep a schedule, once.
--
-- KEYS[1] gpuflow.schedules  KEYS[2] gpuflow.schedules.templates
-- ARGV[1] name  ARGV[2] its record, JSON  ARGV[3] its template, JSON  ARGV[4] '1' to replace one of this name
-- ARGV[5] most schedules
--
-- The same call again changes nothing. Returns 'kept', 'taken' (there is another one of this name) or 'full'.
local there = redis.call('HGET', KEYS[1], ARGV[1])
if there and ARGV[4] ~= '1' then
  local same = there == ARGV[2] and redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[3]
  return same and 'kept' or 'taken'
end
if not there and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then return 'full' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 'kept'
