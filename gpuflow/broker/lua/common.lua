-- What the steps of broker and ledger share. Stands before each of them.
--
-- `ready` is the key gpuflow.ready: demand queue -> order of its best head; what waits in other queues is not in it.
-- A message of a demand queue begins with the time at which it was queued first, on the server's clock: {"at":...,
-- Every other key is derived from `ready`, whose front is the global prefix.
local SEPARATOR = '\6\22'

local function prefix_of(ready) return string.sub(ready, 1, -14) end

local function queue_of(ready, list)
  local name = string.sub(list, #ready - 12)
  local cut = string.find(name, SEPARATOR, 1, true)
  return cut and string.sub(name, 1, cut - 1) or name
end

-- Counts of the fleet, for metrics (metrics/counters.py): the hash `gpuflow.metrics` has `<name>\n<label>\n<task type>`,
-- and for some `\n<queue>` -> a whole number that only grows. Task types and queues are named by users: beyond so many
-- fields, a new one is counted under the queue 'other', and beyond twice as many under the type 'other', so that what was
-- submitted and what has ended of a type go to that type. A count that cannot be kept fails no step.
local MOST_SERIES = 5000
local LONGEST_LABEL = 120

local function label_of(text)
  text = text or ''
  return (#text > LONGEST_LABEL or string.find(text, '\n', 1, true)) and 'other' or text
end

-- Add to one field; false, and nothing added, if it is new and the hash has `most` already.
local function add_count(key, field, amount, most)
  if redis.pcall('HINCRBY', key, field, amount) == tonumber(amount) and redis.call('HLEN', key) > most then
    redis.call('HDEL', key, field)
    return false
  end
  return true
end

local function count(prefix, amount, name, label, task_type, queue)
  local key, front, other = prefix .. 'gpuflow.metrics', name .. '\n' .. label .. '\n', queue and '\nother' or ''
  local of_type = front .. label_of(task_type)
  if queue and add_count(key, of_type .. '\n' .. label_of(queue), amount, MOST_SERIES) then return end
  if add_count(key, of_type .. other, amount, 2 * MOST_SERIES) then return end
  redis.pcall('HINCRBY', key, front .. 'other' .. other, amount)
end

-- Count a duration in its bucket, and its milliseconds. metrics/counters.py has the same bounds.
local SECONDS_BOUNDS = {0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400}

local function observe(prefix, name, task_type, seconds, bounds)
  local bucket = '+Inf'
  for _, bound in ipairs(bounds or SECONDS_BOUNDS) do
    if seconds <= bound then
      bucket = tostring(bound)
      break
    end
  end
  count(prefix, 1, name .. '_bucket', bucket, task_type)
  count(prefix, string.format('%.0f', math.max(0, seconds) * 1000), name .. '_ms', '', task_type)
end

-- Return when a message was first queued, as text; nil for one of a plain queue or of a stock producer.
local function queued_at(raw) return string.match(raw, '^{"at":([%d.]+),') end

-- Stamp a message with the time, and with hints: text such as '"x": "echo", ' (routing/affinity.py).
local function stamped(raw, seconds, hints)
  return '{"at":' .. seconds .. ',' .. hints .. string.sub(raw, 2)
end

-- Enter a demand queue into the index by its best head: priority first, then time; take out an empty one.
local function refresh(ready, queue)
  local base = prefix_of(ready) .. queue
  local lists = {}
  for level = 9, 0, -1 do
    lists[10 - level] = level == 5 and base or base .. SEPARATOR .. (level == 0 and 10 or level)
  end
  if redis.call('EXISTS', unpack(lists)) == 0 then
    redis.call('ZREM', ready, queue)
    return
  end
  for place, list in ipairs(lists) do
    local raw = redis.call('LINDEX', list, -1)
    if raw then
      local tenths_of_ms = math.floor(tonumber(queued_at(raw) or '0') * 10000)
      redis.call('ZADD', ready, string.format('%.0f', (place - 1) * 1e14 + tenths_of_ms), queue)
      return
    end
  end
end

local function wake(ready, group, token, seconds)
  local bell = redis.call('SPOP', prefix_of(ready) .. 'gpuflow.waiters:' .. group)
  if not bell then return false end
  redis.call('LPUSH', bell, token)
  redis.call('EXPIRE', bell, seconds)
  return true
end

-- Wake one consumer that waits for a message of `queue`: of a demand queue, one of the class that suits best, and one
-- of each class that has not said yet whether it serves it and says so then. The token names the queue, so that a
-- consumer that cannot take from it now wakes the next one, `hops` times at most. A token that nobody reads expires after
-- `seconds`.
local function ring(ready, queue, seconds, hops)
  local token = (hops or 16) .. ' ' .. queue
  if wake(ready, queue, token, seconds) then return end
  local prefix = prefix_of(ready)
  local known = prefix .. 'queue:' .. queue .. ':classes'
  if redis.call('EXISTS', prefix .. 'queue:' .. queue) == 0 then return end
  for _, class in ipairs(redis.call('ZRANGEBYSCORE', known, 0, '+inf')) do
    if wake(ready, class, token, seconds) then break end
  end
  for _, class in ipairs(redis.call('ZDIFF', 2, prefix .. 'gpuflow.classes', known)) do
    wake(ready, class, token, seconds)
  end
end

-- Note that a demand queue is used; the first time, what it asks for.
local function register(ready, queue, requirement, seconds)
  local prefix = prefix_of(ready)
  if redis.call('SADD', prefix .. 'gpuflow.queues', queue) == 1 then
    redis.call('HSET', prefix .. 'queue:' .. queue, 'name', queue, 'requirement', requirement, 'created_at', seconds)
  end
  redis.call('HSET', prefix .. 'queue:' .. queue, 'used_at', seconds)
end

-- Let a waiting task move on to its next alternative after some seconds.
local function fall_back_in(ready, task, seconds)
  local now = redis.call('TIME')
  redis.call('ZADD', prefix_of(ready) .. 'gpuflow.fallbacks', now[1] + now[2] / 1000000 + seconds, task)
end

-- Put a message into its list: 'front' (it is next) or 'back'. One of a stock producer in a demand queue counts too.
local function put(ready, list, side, raw, seconds)
  redis.call(side == 'front' and 'RPUSH' or 'LPUSH', list, raw)
  local queue = queue_of(ready, list)
  if queued_at(raw) or redis.call('EXISTS', prefix_of(ready) .. 'queue:' .. queue) == 1 then refresh(ready, queue) end
  ring(ready, queue, seconds)
end

-- Let a message wait: a sweep puts it into its list `pause` seconds from now. If it is due before the next ordinary
-- sweep, and nobody sweeps in time for an earlier one, the keeper of one consumer is to come in time: any that waits for
-- control tasks, as full workers do, too, or else for that queue.
local function delay(ready, delayed, parked, tag, side, list, raw, pause, seconds)
  local time = redis.call('TIME')
  local now = time[1] + time[2] / 1000000
  redis.call('ZADD', delayed, string.format('%.6f', now + pause), tag)
  redis.call('HSET', parked, tag, side .. '\n' .. list .. '\n' .. raw)
  if pause >= 1 then return end
  local alarm = tonumber(redis.call('HGET', prefix_of(ready) .. 'gpuflow.sweep', 'alarm') or '0')
  if alarm > now and alarm <= now + pause then return end
  if not wake(ready, 'gpuflow.control', 'due', seconds) then wake(ready, queue_of(ready, list), 'due', seconds) end
end

-- Take a waiting message out of its list; returns whether it was there.
local function take_out(ready, list, raw)
  local found = redis.call('LREM', list, -1, raw) > 0
  local queue = queue_of(ready, list)
  if found and (queued_at(raw) or redis.call('ZSCORE', ready, queue)) then refresh(ready, queue) end
  return found
end

-- Put a message aside that nobody can read or run, with the reason; the newest are kept.
local function set_aside(ready, list, raw, why)
  local key = prefix_of(ready) .. 'gpuflow.unreadable'
  local now = redis.call('TIME')
  redis.call('LPUSH', key, cjson.encode({at = tonumber(now[1]), list = list, why = why, message = raw}))
  redis.call('LTRIM', key, 0, 9999)
end

-- A call whose answer is lost is sent again, and much may have come between. It has an id, and its answer is noted in the
-- hash that it changes: the repeat gets the same answer and changes nothing. Of each step the newest calls are known,
-- one a line: several users may ask the same thing.
local MAX_NOTED_CALLS = 8

local function answer_to(hash, step, call)
  for line in string.gmatch(redis.call('HGET', hash, step .. '_call') or '', '[^\n]+') do
    if string.sub(line, 1, #call + 1) == call .. ' ' then return string.sub(line, #call + 2) end
  end
end

local function note_answer(hash, step, call, answer)
  local lines = {call .. ' ' .. answer}
  for line in string.gmatch(redis.call('HGET', hash, step .. '_call') or '', '[^\n]+') do
    if #lines < MAX_NOTED_CALLS then lines[#lines + 1] = line end
  end
  redis.call('HSET', hash, step .. '_call', table.concat(lines, '\n'))
end

-- End the lease of one message.
local function end_lease(leases, unacked, owners, tag)
  redis.call('ZREM', leases, tag)
  redis.call('HDEL', unacked, tag)
  redis.call('HDEL', owners, tag)
end

-- Remember that a delivery of a message goes back undone: the next one says so (`redelivered`), and by the time of its
-- last return deliveries of one message are told apart.
local function note_return(ready, tag)
  local key, time = prefix_of(ready) .. 'gpuflow.returned', redis.call('TIME')
  local last = tonumber(redis.call('ZSCORE', key, tag) or '0')
  redis.call('ZADD', key, string.format('%.6f', math.max(time[1] + time[2] / 1000000, last + 0.000001)), tag)
end

-- Whether a message has gone back since the delivery to which `last` was told as its last return ('0' for none).
local function has_returned(ready, tag, last)
  local at = redis.call('ZSCORE', prefix_of(ready) .. 'gpuflow.returned', tag)
  return at and tonumber(at) > tonumber(last)
end

-- Forget that: the message has ended.
local function forget_return(ready, tag) redis.call('ZREM', prefix_of(ready) .. 'gpuflow.returned', tag) end

-- Note that the signature of a message has been used, for as many seconds as it is valid yet: no message with it is run
-- again. Without an id, nothing was signed.
local function use_signature(ready, id, seconds)
  if id and id ~= '' then redis.call('SET', prefix_of(ready) .. 'gpuflow.used:' .. id, '', 'EX', seconds) end
end

-- Note that the signature which stands in a text has been used (signatures.py: its form, CLOCKS_SECONDS); no other one.
local function use_signature_of(ready, text)
  local until_, mac = string.match(text or '', '"gpuflow_signature": "1%.%x+%.%d+%.(%d+)%.(%x+)"')
  if not until_ then until_, mac = string.match(text or '', '^1%.%x+%.%d+%.(%d+)%.(%x+)$') end
  local left = until_ and tonumber(until_) - tonumber(redis.call('TIME')[1]) or 0
  if left > 0 and left < 1e10 then use_signature(ready, string.sub(mac, 1, 32), string.format('%.0f', left + 86400)) end
end

-- Return the list from which a delivery came, if its lease is still that owner's; nil when it was LOST: another owner
-- holds it, or it was settled before, or it went back since `last` (has_returned).
local function list_of_lease(owners, ready, tag, owner, last)
  local held = redis.call('HGET', owners, tag)
  if not held then return end
  local cut = string.find(held, '\n', 1, true)
  if string.sub(held, 1, cut - 1) ~= owner or has_returned(ready, tag, last) then return end
  return string.sub(held, cut + 1)
end
