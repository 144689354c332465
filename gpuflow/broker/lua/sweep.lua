-- Put messages whose lease has ended back to the front of their lists, and delayed ones whose time has come into
-- theirs. One step, on the server's clock; every consumer and beat take it every second, and it does its work at most
-- about twice a second for all of them together: what a sweep costs the server does not grow with the fleet. Delayed
-- messages alone move whenever they are due.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.ready
-- KEYS[5] gpuflow.sweep  KEYS[6] gpuflow.delayed  KEYS[7] gpuflow.parked
-- KEYS[8] gpuflow.present  KEYS[9] gpuflow.workers  KEYS[10] gpuflow.queues
-- ARGV[1] lease in seconds  ARGV[2] gap between sweeps, in seconds, above which there is grace
-- ARGV[3] most messages to move in one step  ARGV[4] doorbell token seconds
-- ARGV[5] prefix of the workers' heartbeat keys  ARGV[6] how many demand queues to look into
-- ARGV[7] seconds after a sweep in which another one moves delayed messages alone, unless there was more than it could
-- ARGV[8] seconds until the caller sweeps again by itself; 0: it cannot come earlier
--
-- Of a delayed message that is due before that, one caller is told: it comes again in time for it.
-- Messages of stock producers are in no index: a few demand queues, chosen at random, are entered anew each time.
-- After a pause or a clock that jumped, nobody could renew: every lease gets one term of grace.
-- Returns {restored, graced, name of the server run, 1 while the fleet gathers after a new run, seconds until the
-- caller is to come again or '', what was restored, each as '<owner token>\n<task id>'}.
-- A task that has waited long for one alternative of its accelerators moves on to the next, in the same step.
local function fall_back(ready, task, seconds)
  local prefix = prefix_of(ready)
  local record = prefix .. 'task:' .. task
  local state, list, message, queue, text, pause = unpack(redis.call('HMGET', record,
    'state', 'list', 'message', 'queue', 'alternatives', 'fallback_seconds'))
  local alternatives = state == 'QUEUED' and text and cjson.decode(text) or {}
  local current
  for i, one in ipairs(alternatives) do
    if one.queue == queue then current = i end
  end
  if not current then
    redis.call('ZREM', prefix .. 'gpuflow.fallbacks', task)
    return
  end
  fall_back_in(ready, task, pause)
  if not take_out(ready, list, message) then return end
  local following = alternatives[current % #alternatives + 1]
  local time = redis.call('TIME')
  register(ready, following.queue, following.requirement, time[1])
  local moved_to = prefix .. following.queue .. string.sub(list, #prefix + #queue + 1)
  redis.call('HSET', record, 'queue', following.queue, 'list', moved_to, 'requirement', following.requirement)
  redis.call('XADD', prefix .. 'events:' .. task, '*', 'event',
    cjson.encode({event = 'state', state = 'QUEUED', queue = following.queue, after = 'fallback'}))
  put(ready, moved_to, 'front', message, seconds)
end

-- Of a message that is never acknowledged (a purge) it is forgotten after so long that it had been returned.
local RETURNED_SECONDS = 90 * 86400
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local at, run, hold, more = unpack(redis.call('HMGET', KEYS[5], 'at', 'run', 'hold', 'more'))
local last = tonumber(at or '-1')
hold = tonumber(hold or '0')

local function next_due()
  local first = redis.call('ZRANGE', KEYS[6], 0, 0, 'WITHSCORES')
  return tonumber(first[2])
end

-- Seconds until the next delayed message is due, where that is soon and nobody else comes for it.
local function alarm()
  local due, usual = next_due(), tonumber(ARGV[8])
  if not due or due >= now + usual then return '' end
  local set = tonumber(redis.call('HGET', KEYS[5], 'alarm') or '')
  if set and set <= due and set > now then return '' end
  redis.call('HSET', KEYS[5], 'alarm', string.format('%.6f', due))
  return string.format('%.6f', math.max(0, due - now))
end

local most = tonumber(ARGV[3])

-- Put delayed messages into their lists whose time has come; returns whether there may be more of them.
local function move_due()
  local due = redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', now, 'LIMIT', 0, most)
  for _, tag in ipairs(due) do
    local parked = redis.call('HGET', KEYS[7], tag)
    if parked then
      local side = string.find(parked, '\n', 1, true)
      local list = string.find(parked, '\n', side + 1, true)
      put(KEYS[4], string.sub(parked, side + 1, list - 1), string.sub(parked, 1, side - 1),
        string.sub(parked, list + 1), ARGV[4])
    end
    redis.call('ZREM', KEYS[6], tag)
    redis.call('HDEL', KEYS[7], tag)
  end
  return #due == most
end

if now >= last and now - last < tonumber(ARGV[7]) and more ~= '1' then
  if move_due() then redis.call('HSET', KEYS[5], 'more', '1') end
  return {0, 0, run or '', hold > now and 1 or 0, alarm(), {}}
end
redis.call('HSET', KEYS[5], 'at', string.format('%.6f', now), 'more', '0')
local gathering = 0
if hold > now then
  gathering = 1
  local missing = 0
  for _, worker in ipairs(redis.call('SMEMBERS', KEYS[9])) do
    if redis.call('EXISTS', ARGV[5] .. worker .. ':hb') == 1 and redis.call('SISMEMBER', KEYS[8], worker) == 0 then
      missing = missing + 1
    end
  end
  if missing == 0 or hold > now + tonumber(ARGV[1]) then
    redis.call('HSET', KEYS[5], 'hold', '0')
    gathering = 0
  end
end
local restored, graced = 0, 0
local ended, lost = {}, {}
if now < last or now - last > tonumber(ARGV[2]) then
  local held = redis.call('ZRANGE', KEYS[1], 0, -1)
  local ends = now + tonumber(ARGV[1])
  for _, tag in ipairs(held) do redis.call('ZADD', KEYS[1], ends, tag) end
  graced = #held
else
  ended = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, most)
  for _, tag in ipairs(ended) do
    local raw = redis.call('HGET', KEYS[2], tag)
    local held = redis.call('HGET', KEYS[3], tag)
    if raw and held then
      put(KEYS[4], string.sub(held, string.find(held, '\n', 1, true) + 1), 'front', raw, ARGV[4])
      note_return(KEYS[4], tag)
      restored = restored + 1
      local owner = string.sub(held, 1, string.find(held, '\n', 1, true) - 1)
      lost[#lost + 1] = owner .. '\n' .. (string.match(raw, '"id": "([^"]+)"') or '')
    end
    end_lease(KEYS[1], KEYS[2], KEYS[3], tag)
  end
end
local more_due = move_due()
local fallbacks = prefix_of(KEYS[4]) .. 'gpuflow.fallbacks'
for _, task in ipairs(redis.call('ZRANGEBYSCORE', fallbacks, '-inf', now, 'LIMIT', 0, ARGV[3])) do
  fall_back(KEYS[4], task, ARGV[4])
end
for _, queue in ipairs(redis.call('SRANDMEMBER', KEYS[10], ARGV[6])) do
  refresh(KEYS[4], queue)
end
redis.call('ZREMRANGEBYSCORE', prefix_of(KEYS[4]) .. 'gpuflow.returned', '-inf', now - RETURNED_SECONDS)
redis.call('ZREMRANGEBYSCORE', prefix_of(KEYS[4]) .. 'gpuflow.avoided', '-inf', now)
if #ended == most or more_due then redis.call('HSET', KEYS[5], 'more', '1') end
return {restored, graced, run or '', gathering, alarm(), lost}
