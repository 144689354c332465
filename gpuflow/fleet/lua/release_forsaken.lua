-- Enable the workers that the autoscaler has disabled, unless a beat leads.
--
-- KEYS[1] gpuflow.scaling.leader  KEYS[2..] worker:<id>, ...
--
-- Returns how many were enabled, -1 while a beat leads.
local now = redis.call('TIME')
if tonumber(redis.call('HGET', KEYS[1], 'until') or '0') > now[1] + now[2] / 1000000 then return -1 end
local count = 0
for i = 2, #KEYS do
  if drop_if_forsaken(KEYS[i], KEYS[1], 0) then count = count + 1 end
end
return count
