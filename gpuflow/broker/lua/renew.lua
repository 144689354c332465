-- Renew the leases of one owner.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.owners
-- ARGV[1] owner token  ARGV[2] lease in seconds  ARGV[3..] delivery tags
--
-- Returns {LOST, free}: the tags that another owner holds, and those that nobody holds.
local now = redis.call('TIME')
local ends = now[1] + now[2] / 1000000 + tonumber(ARGV[2])
local lost, free = {}, {}
for i = 3, #ARGV do
  local held = redis.call('HGET', KEYS[2], ARGV[i])
  if not held then
    free[#free + 1] = ARGV[i]
  elseif string.sub(held, 1, string.find(held, '\n', 1, true) - 1) == ARGV[1] then
    redis.call('ZADD', KEYS[1], ends, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return {lost, free}
