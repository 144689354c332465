-- Write down the fingerprint of the broker's user of a worker token.
--
-- KEYS[1] access:token:<id>
-- ARGV[1] SHA-256 of the token that the user was made for  ARGV[2] fingerprint
--
-- Returns 1, or 0 where the token is another one by now.
if redis.call('HGET', KEYS[1], 'hash') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'made', ARGV[2])
return 1
