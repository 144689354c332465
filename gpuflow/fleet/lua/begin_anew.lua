-- Begin a new life of a worker: a drain is over, and what the autoscaler wanted of the old one. What an operator has
-- disabled or enabled stays so, and a retired worker ends.
--
-- KEYS[1] worker:<id>  KEYS[2] gpuflow.audit  KEYS[3] gpuflow.audit.sent:<call>
-- ARGV[1] worker id  ARGV[2] seconds that a repeat of this call, whose first answer was lost, is recognised
-- ARGV[3] its host  ARGV[4] its version
local function noted(action, ...)
  if not redis.call('SET', KEYS[3], '1', 'NX', 'EX', ARGV[2]) then return end
  audit(KEYS[2], action, 'worker:' .. ARGV[1], 'worker:' .. ARGV[1], 'host', ARGV[3], ...)
end
local desired, by = unpack(redis.call('HMGET', KEYS[1], 'desired', 'desired_by'))
if desired == 'retired' then
  noted('worker.refused', 'reason', 'it is retired')
  return 0
end
noted('worker.register', 'version', ARGV[4])
redis.call('HDEL', KEYS[1], 'wanted', 'wanted_until')
if desired == 'draining' or by == 'autoscale' then drop_desired(KEYS[1]) end
return 1
