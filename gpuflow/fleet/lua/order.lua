-- Read what a worker is to be. That it is disabled by the autoscaler counts only while a beat leads, or has of late.
--
-- KEYS[1] worker:<id>  KEYS[2] gpuflow.scaling.leader
-- ARGV[1] after so many seconds without a leader it is forgotten
--
-- Returns {desired, by, reason, at, wanted, seconds until a drain is to be done}, each '' where there is none.
drop_if_forsaken(KEYS[1], KEYS[2], tonumber(ARGV[1]))
local names = {'desired', 'desired_by', 'desired_reason', 'desired_at', 'wanted', 'wanted_until'}
local found = redis.call('HMGET', KEYS[1], unpack(names))
for i = 1, #names do found[i] = found[i] or '' end
if found[6] ~= '' then
  local now = redis.call('TIME')
  found[6] = string.format('%.6f', math.max(0, tonumber(found[6]) - now[1] - now[2] / 1000000))
end
return found
