-- Read what waits: of every demand queue that is not empty, and of some plain ones. Changes nothing.
--
-- KEYS[1] gpuflow.ready  KEYS[2] gpuflow.sweep
-- ARGV[1..] names of plain queues, and of demand queues to read though nothing waits in them
--
-- Returns {time, 1 while the fleet gathers after a restart of the server, {name, requirement JSON or '', mean seconds of
-- its tasks or '', when its oldest message was queued or '', depth of priority 9, ... of priority 0}, ...}.
local prefix = prefix_of(KEYS[1])
local now = redis.call('TIME')
local answer = {string.format('%d.%06d', now[1], now[2]),
  tonumber(redis.call('HGET', KEYS[2], 'hold') or '0') > tonumber(now[1]) and 1 or 0}
local names, seen = redis.call('ZRANGE', KEYS[1], 0, -1), {}
for _, name in ipairs(ARGV) do names[#names + 1] = name end
for _, name in ipairs(names) do
  if not seen[name] then
    seen[name] = true
    local base, oldest, depths = prefix .. name, nil, {}
    for level = 9, 0, -1 do
      local list = level == 5 and base or base .. SEPARATOR .. (level == 0 and 10 or level)
      local depth = redis.call('LLEN', list)
      depths[#depths + 1] = depth
      local at = depth > 0 and tonumber(queued_at(redis.call('LINDEX', list, -1)) or '')
      if at and (not oldest or at < oldest) then oldest = at end
    end
    local requirement, took = unpack(redis.call('HMGET', prefix .. 'queue:' .. name, 'requirement', 'task_seconds'))
    answer[#answer + 1] = {name, requirement or '', took or '', oldest and string.format('%.6f', oldest) or '',
      unpack(depths)}
  end
end
return answer
