-- Give a worker token another secret, or none ('' makes it void).
--
-- KEYS[1] access:token:<id>
-- ARGV[1] SHA-256 of the new token, or ''
--
-- Returns 'replaced', or 'gone': there is no such token.
if redis.call('EXISTS', KEYS[1]) == 0 then return 'gone' end
if ARGV[1] == '' then
  redis.call('HDEL', KEYS[1], 'hash')
  return 'replaced'
end
if redis.call('HGET', KEYS[1], 'hash') == ARGV[1] then return 'replaced' end
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'hash', ARGV[1], 'rotated_at', string.format('%.6f', now[1] + now[2] / 1000000))
return 'replaced'
