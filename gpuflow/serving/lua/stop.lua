-- Serve a model no more.
--
-- KEYS[1] gpuflow.served  KEYS[2] gpuflow.served.counts  KEYS[3] gpuflow.served.failures  KEYS[4] gpuflow.audit
-- ARGV[1] name  ARGV[2] who acts
--
-- Returns 1, or 0: no model of this name is served.
local there = redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if there == 1 then audit(KEYS[4], 'model.stop', ARGV[2], 'model:' .. ARGV[1]) end
return there
