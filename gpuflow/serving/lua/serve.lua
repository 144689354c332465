-- Serve a model, or change how many replicas of it there are to be.
--
-- KEYS[1] gpuflow.served  KEYS[2] gpuflow.served.counts  KEYS[3] gpuflow.served.failures  KEYS[4] gpuflow.audit
-- ARGV[1] name  ARGV[2] its record, JSON  ARGV[3] digest of what is loaded and for whom, which is in the record too
-- ARGV[4] how many replicas  ARGV[5] most served models  ARGV[6] who acts
--
-- The same call again changes nothing. Returns 'served', 'scaled', 'same', 'taken' (another model has this name) or
-- 'full'.
local there = redis.call('HGET', KEYS[1], ARGV[1])
if there then
  local ok, known = pcall(cjson.decode, there)
  if not ok or type(known) ~= 'table' or known.digest ~= ARGV[3] then return 'taken' end
  if redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[4] then return 'same' end
elseif redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then
  return 'full'
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[4])
redis.call('HDEL', KEYS[3], ARGV[1])
audit(KEYS[4], 'model.serve', ARGV[6], 'model:' .. ARGV[1], 'replicas', ARGV[4])
return there and 'scaled' or 'served'
