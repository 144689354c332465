-- Remove a token and the name of its worker.
--
-- KEYS[1] access:token:<id>  KEYS[2] access:tokens  KEYS[3] access:workers  KEYS[4] access:deleted
-- ARGV[1] id  ARGV[2] seconds for which the id of a worker's token is known still
--
-- Returns 1, or 0 where there was none. A name that has another token by now is left alone.
local name = redis.call('HGET', KEYS[1], 'name')
if name then
  local now = tonumber(redis.call('TIME')[1])
  redis.call('ZADD', KEYS[4], now, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now - tonumber(ARGV[2]))
end
if name and redis.call('HGET', KEYS[3], name) == ARGV[1] then redis.call('HDEL', KEYS[3], name) end
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
