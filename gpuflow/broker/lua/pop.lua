-- Look, then take: lease the next message of the most urgent non-empty list.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.waiters
-- KEYS[5] gpuflow.unreadable  KEYS[6] gpuflow.sweep  KEYS[7] doorbell of this consumer
-- KEYS[8..] lists, most urgent first
-- ARGV[1] owner token  ARGV[2] lease in seconds
--
-- Returns {list, message}; or nil, after registering the doorbell in the same step, so that no publish is missed.
-- Nothing is taken while the fleet gathers after a new server run (arrive.lua).
-- A message that is not JSON with a delivery tag goes to the unreadable list as it is and is never lost.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local hold = tonumber(redis.call('HGET', KEYS[6], 'hold') or '0')
if hold <= now then
  for i = 8, #KEYS do
    local raw = redis.call('LINDEX', KEYS[i], -1)
    while raw do
      local ok, message = pcall(cjson.decode, raw)
      local tag = ok and type(message) == 'table' and type(message['properties']) == 'table'
        and message['properties']['delivery_tag']
      redis.call('RPOP', KEYS[i])
      if type(tag) == 'string' then
        redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), tag)
        redis.call('HSET', KEYS[2], tag, raw)
        redis.call('HSET', KEYS[3], tag, ARGV[1] .. '\n' .. KEYS[i])
        redis.call('SREM', KEYS[4], KEYS[7])
        return {KEYS[i], raw}
      end
      redis.call('LPUSH', KEYS[5], raw)
      raw = redis.call('LINDEX', KEYS[i], -1)
    end
  end
end
redis.call('SADD', KEYS[4], KEYS[7])
return false
