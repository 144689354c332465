-- Write a new token, once.
--
-- KEYS[1] access:token:<id>  KEYS[2] access:tokens  KEYS[3] access:workers
-- ARGV[1] id  ARGV[2] SHA-256 of the token  ARGV[3] name of the worker, or '' for a token of a person
-- ARGV[4] seconds that it is valid, or '' for ever  ARGV[5...] further fields and values
--
-- The same call again changes nothing. Returns 'created', or 'taken': the id, or the name of the
-- worker, has another token.
if redis.call('HGET', KEYS[1], 'hash') == ARGV[2] then return 'created' end
if redis.call('EXISTS', KEYS[1]) == 1 then return 'taken' end
if ARGV[3] ~= '' then
  local other = redis.call('HGET', KEYS[3], ARGV[3])
  if other and other ~= ARGV[1] then return 'taken' end
  redis.call('HSET', KEYS[3], ARGV[3], ARGV[1])
end
local now = redis.call('TIME')
local seconds = now[1] + now[2] / 1000000
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'hash', ARGV[2], 'created_at', string.format('%.6f', seconds))
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], 'expires_at', string.format('%.6f', seconds + tonumber(ARGV[4])))
end
if #ARGV > 4 then redis.call('HSET', KEYS[1], unpack(ARGV, 5)) end
redis.call('ZADD', KEYS[2], 'NX', seconds, ARGV[1])
return 'created'
