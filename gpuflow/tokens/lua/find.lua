-- Return the fields of tokens that are valid now, by the server's clock, each as a list of fields and values.
--
-- KEYS access:token:<id> of each
--
-- A token that is unknown, has expired or is void gives an empty list.
local now = redis.call('TIME')
local seconds = now[1] + now[2] / 1000000
local found = {}
for number, key in ipairs(KEYS) do
  local until_ = redis.call('HGET', key, 'expires_at')
  found[number] = {}
  if redis.call('HEXISTS', key, 'hash') == 1 and not (until_ and tonumber(until_) <= seconds) then
    found[number] = redis.call('HGETALL', key)
  end
end
return found
