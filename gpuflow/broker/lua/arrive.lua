-- A process meets a server run that knows none of its scripts: the server was restarted, perhaps from an older
-- snapshot. Nobody could renew, and what runs may look as if it waited: every lease gets one term of grace, and
-- nothing is taken until every worker with a live heartbeat has said what it holds (sweep.lua), at most one term.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.sweep  KEYS[3] gpuflow.present  KEYS[4] gpuflow.workers
-- ARGV[1] lease in seconds  ARGV[2] name of this run  ARGV[3] prefix of the workers' heartbeat keys
--
-- Returns the number of leases that got grace, or -1 when this run is known. Without a live worker nothing is held up.
if redis.call('HGET', KEYS[2], 'run') == ARGV[2] then return -1 end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local ends = now + tonumber(ARGV[1])
local held = redis.call('ZRANGE', KEYS[1], 0, -1)
for _, tag in ipairs(held) do redis.call('ZADD', KEYS[1], ends, tag) end
redis.call('DEL', KEYS[3])
local awaited = 0
for _, worker in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  awaited = awaited + redis.call('EXISTS', ARGV[3] .. worker .. ':hb')
end
redis.call('HSET', KEYS[2], 'at', string.format('%.6f', now), 'run', ARGV[2],
  'hold', awaited > 0 and string.format('%.6f', ends) or '0')
return #held
