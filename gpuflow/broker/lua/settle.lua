-- End the lease of one message: acknowledge it, or put it back. Only its owner may.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.waiters
-- KEYS[5] doorbell of this consumer (a slot is free now: it looks again)
-- ARGV[1] delivery tag  ARGV[2] owner token  ARGV[3] 'ack', 'front' or 'back'  ARGV[4] doorbell token seconds
--
-- Returns 1 done, 0 LOST (another owner holds the lease, or it was settled before): nothing was changed.
local held = redis.call('HGET', KEYS[3], ARGV[1])
if not held then return 0 end
local cut = string.find(held, '\n', 1, true)
if string.sub(held, 1, cut - 1) ~= ARGV[2] then return 0 end
local list = string.sub(held, cut + 1)
if ARGV[3] ~= 'ack' then
  local raw = redis.call('HGET', KEYS[2], ARGV[1])
  if raw then redis.call(ARGV[3] == 'front' and 'RPUSH' or 'LPUSH', list, raw) end
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
local bells = ARGV[3] == 'ack' and {KEYS[5]} or redis.call('SMEMBERS', KEYS[4])
for _, bell in ipairs(bells) do
  if redis.call('SREM', KEYS[4], bell) == 1 then
    redis.call('LPUSH', bell, '1')
    redis.call('EXPIRE', bell, ARGV[4])
  end
end
return 1
