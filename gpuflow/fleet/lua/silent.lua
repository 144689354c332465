-- Write OFFLINE into the entries of workers whose heartbeat has expired, which nobody wrote meanwhile; return which.
--
-- KEYS: worker:<id> and worker:<id>:hb of each, in turn
local silent = {}
for i = 1, #KEYS, 2 do
  local state = redis.call('HGET', KEYS[i], 'state')
  if state and state ~= 'OFFLINE' and redis.call('EXISTS', KEYS[i + 1]) == 0 then
    redis.call('HSET', KEYS[i], 'state', 'OFFLINE', 'stopped', '0')
    silent[#silent + 1] = (i - 1) / 2
  end
end
return silent
