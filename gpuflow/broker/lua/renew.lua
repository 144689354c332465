-- Renew the leases of one owner.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.owners  KEYS[3] gpuflow.sweep
-- ARGV[1] owner token  ARGV[2] lease in seconds  ARGV[3] server run that the owner knows, or ''
-- ARGV[4..] delivery tags
--
-- Returns {LOST, free}: the tags that another owner holds, and those that nobody holds; nil in another server run,
-- whose snapshot may be older than the leases (arrive.lua): nothing is LOST by that alone.
if ARGV[3] ~= '' and redis.call('HGET', KEYS[3], 'run') ~= ARGV[3] then return false end
-- The server refuses a script's first write when its memory is full, but not this one, and then none that follows. A
-- renewal needs no memory, and without it a full server would end all that runs.
redis.call('ZREM', KEYS[1], '')
local now = redis.call('TIME')
local ends = now[1] + now[2] / 1000000 + tonumber(ARGV[2])
local lost, free = {}, {}
for i = 4, #ARGV do
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
