-- Look, then take: lease the next message of the most urgent non-empty list.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.waiters
-- KEYS[5] gpuflow.unreadable  KEYS[6] doorbell of this consumer  KEYS[7..] lists, most urgent first
-- ARGV[1] owner token  ARGV[2] lease in seconds
--
-- Returns {list, message}; or nil, after registering the doorbell in the same step, so that no publish is missed.
-- A message that is not JSON with a delivery tag goes to the unreadable list as it is and is never lost.
for i = 7, #KEYS do
  local raw = redis.call('LINDEX', KEYS[i], -1)
  while raw do
    local ok, message = pcall(cjson.decode, raw)
    local tag = ok and type(message) == 'table' and type(message['properties']) == 'table'
      and message['properties']['delivery_tag']
    redis.call('RPOP', KEYS[i])
    if type(tag) == 'string' then
      local now = redis.call('TIME')
      redis.call('ZADD', KEYS[1], now[1] + now[2] / 1000000 + tonumber(ARGV[2]), tag)
      redis.call('HSET', KEYS[2], tag, raw)
      redis.call('HSET', KEYS[3], tag, ARGV[1] .. '\n' .. KEYS[i])
      redis.call('SREM', KEYS[4], KEYS[6])
      return {KEYS[i], raw}
    end
    redis.call('LPUSH', KEYS[5], raw)
    raw = redis.call('LINDEX', KEYS[i], -1)
  end
end
redis.call('SADD', KEYS[4], KEYS[6])
return false
