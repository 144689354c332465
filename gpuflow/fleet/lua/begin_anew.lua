-- Begin a new life of a worker: a drain is over, and what the autoscaler wanted of the old one. What an operator has
-- disabled or enabled stays so, and a retired worker ends.
--
-- KEYS[1] worker:<id>
local desired, by = unpack(redis.call('HMGET', KEYS[1], 'desired', 'desired_by'))
if desired == 'retired' then return 0 end
redis.call('HDEL', KEYS[1], 'wanted', 'wanted_until')
if desired == 'draining' or by == 'autoscale' then drop_desired(KEYS[1]) end
return 1
