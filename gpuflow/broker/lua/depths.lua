-- Read what waits: of every demand queue that is not empty, and of some plain ones. Changes nothing.
--
-- For users who may only read: without KEYS, since a server asks who names one in a step for the right to write it, and
-- without common.lua, whose steps write.
-- ARGV[1] prefix of all keys  ARGV[2] gpuflow.ready  ARGV[3] gpuflow.sweep  ARGV[4] what stands between a queue and its
-- priority in the name of a list (broker/priorities.py)
-- ARGV[5..] names of plain queues, and of demand queues to read though nothing waits in them
--
-- Returns {time, 1 while the fleet gathers after a restart of the server, {name, requirement JSON or '', mean seconds of
-- its tasks or '', when its oldest message was queued or '', depth of priority 9, ... of priority 0}, ...}.
local prefix, separator = ARGV[1], ARGV[4]
local now = redis.call('TIME')
local answer = {string.format('%d.%06d', now[1], now[2]),
  tonumber(redis.call('HGET', ARGV[3], 'hold') or '0') > tonumber(now[1]) and 1 or 0}
local names, seen = redis.call('ZRANGE', ARGV[2], 0, -1), {}
for place = 5, #ARGV do names[#names + 1] = ARGV[place] end
for _, name in ipairs(names) do
  if not seen[name] then
    seen[name] = true
    local base, oldest, depths = prefix .. name, nil, {}
    for level = 9, 0, -1 do
      local list = level == 5 and base or base .. separator .. (level == 0 and 10 or level)
      local depth = redis.call('LLEN', list)
      depths[#depths + 1] = depth
      local at = depth > 0 and tonumber(string.match(redis.call('LINDEX', list, -1), '^{"at":([%d.]+),') or '')
      if at and (not oldest or at < oldest) then oldest = at end
    end
    local requirement, took = unpack(redis.call('HMGET', prefix .. 'queue:' .. name, 'requirement', 'task_seconds'))
    answer[#answer + 1] = {name, requirement or '', took or '', oldest and string.format('%.6f', oldest) or '',
      unpack(depths)}
  end
end
return answer
