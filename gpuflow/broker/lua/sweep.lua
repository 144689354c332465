-- Put messages whose lease has ended back to the front of their lists. One step, on the server's clock.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.waiters
-- KEYS[5] gpuflow.sweep
-- ARGV[1] lease in seconds  ARGV[2] run id of the server  ARGV[3] longest gap between sweeps in seconds
-- ARGV[4] most messages to restore in one step  ARGV[5] doorbell token seconds
--
-- After a pause, a clock that jumped or a new server run, nobody could renew: every lease gets one term of grace.
-- Returns {restored, graced}.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local last = tonumber(redis.call('HGET', KEYS[5], 'at') or '-1')
local run = redis.call('HGET', KEYS[5], 'run')
redis.call('HSET', KEYS[5], 'at', string.format('%.6f', now), 'run', ARGV[2])
if run ~= ARGV[2] or now < last or now - last > tonumber(ARGV[3]) then
  local held = redis.call('ZRANGE', KEYS[1], 0, -1)
  local ends = now + tonumber(ARGV[1])
  for _, tag in ipairs(held) do redis.call('ZADD', KEYS[1], ends, tag) end
  return {0, #held}
end
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[4])
local restored = 0
for _, tag in ipairs(due) do
  local raw = redis.call('HGET', KEYS[2], tag)
  local held = redis.call('HGET', KEYS[3], tag)
  if raw and held then
    redis.call('RPUSH', string.sub(held, string.find(held, '\n', 1, true) + 1), raw)
    restored = restored + 1
  end
  redis.call('ZREM', KEYS[1], tag)
  redis.call('HDEL', KEYS[2], tag)
  redis.call('HDEL', KEYS[3], tag)
end
if restored > 0 then
  for _, bell in ipairs(redis.call('SMEMBERS', KEYS[4])) do
    redis.call('LPUSH', bell, '1')
    redis.call('EXPIRE', bell, ARGV[5])
  end
  redis.call('DEL', KEYS[4])
end
return {restored, 0}
