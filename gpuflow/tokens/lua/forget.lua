-- Remove a token and the name of its worker.
--
-- KEYS[1] access:token:<id>  KEYS[2] access:tokens  KEYS[3] access:workers
-- ARGV[1] id
--
-- Returns 1, or 0 where there was none. A name that has another token by now is left alone.
local name = redis.call('HGET', KEYS[1], 'name')
if name and redis.call('HGET', KEYS[3], name) == ARGV[1] then redis.call('HDEL', KEYS[3], name) end
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
