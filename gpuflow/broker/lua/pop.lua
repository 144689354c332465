-- Look, then take: lease the most urgent message of some queues; of equally urgent ones, the one queued first.
-- Before that, end the leases of messages that are done: so a busy consumer needs one step for each message.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.ready
-- KEYS[5] gpuflow.returned  KEYS[6] gpuflow.sweep  KEYS[7] doorbell of this consumer
-- KEYS[8..] lists: those of priority 9, then those of 8, ..., in each the same queues in the same order
-- ARGV[1] owner token  ARGV[2] lease in seconds  ARGV[3] JSON of how to look (broker/look.py):
--   queues   how many there are
--   page     how many names of the ready index to return, best first
--   pass_on  '<hops> <queue>' that this consumer was woken for and may be unable to serve now, or ''
--   bell     seconds that a doorbell token may lie unread
--   groups   groups of waiters to register in: plain queues, and the class of this worker
--   limits   for each queue, the longest time limit in seconds of a task that may be taken, or -1
--   types    what this worker runs (routing/offers.py); none: all without a dot, and user_types (names with a dot)
--   gpu_types, with_gpus   the same for queues whose tasks get GPUs, and for each queue whether they do; none: types
--   secrets  names of the secrets that tasks may ask for here; none: all
--   sessions the warm sessions here that have a place; for each queue, warm_only: nothing else can be taken from it,
--            and yields: it could, if the sessions here answered no more
--   here     all warm sessions here: nothing is made room for that one of them will answer
--   kept     sessions here that a replica of a served model keeps loaded -> whether they have GPUs: a second replica
--            of one is left to others, with GPUs for a time
--   full     sessions here without a place, beside which none is to be opened: their messages are left
--   models   the models that this worker has   patience: seconds to leave a task to a worker that has its model
-- ARGV[4..] of each delivery to acknowledge: tag, last return, id of its signature ('' for none) and for how many seconds
-- that is valid yet (settle.lua)
--
-- Returns {list, message, names, cold, tag, returned, lost, aside}, `cold` being the queues that have a message for this worker
-- but for their warm_only, `returned` when the message last went back undone, '0' for never, `lost` the tags whose leases
-- were LOST before they were acknowledged, `aside` what was put aside: {how many, the last one's list, why}. With '' for the first two when nothing was taken: then the doorbell is
-- registered in the same step, so that no publish is missed, and another waiter is woken for the queue of pass_on.
-- Nothing is taken while the fleet gathers after a new server run (arrive.lua).
-- A message that is not JSON with a delivery tag is put aside, and one whose tag is that of a leased message: a copy, by
-- which that one would lose its lease.
local ready = KEYS[4]
local look = cjson.decode(ARGV[3])
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
-- Messages of one list that are looked at beyond its head, where the head is not for this worker.
local DEPTH = 20
local NO_TAG = 'it is not JSON with a delivery tag'
-- Lua passes no more arguments at once than some thousand.
local MANY = 1000
-- A head that has waited for so many times the patience goes before tasks whose model this worker has.
local LONGEST = 15

local function as_set(names)
  local set = {}
  for _, name in ipairs(names or {}) do set[name] = true end
  return set
end

local types, models = as_set(look.types or look.user_types), as_set(look.models)
local gpu_types = look.gpu_types and as_set(look.gpu_types) or types
local kept = look.kept or {}
local sessions, full, here = as_set(look.sessions), as_set(look.full), as_set(look.here)
local secrets = look.secrets and as_set(look.secrets)
local choosy = next(models) ~= nil or next(sessions) ~= nil
local cold = {}
-- When the message was queued for which sessions are to take nothing that came later; 0: it is also more urgent.
local stuck
-- Whether a message that sessions could make room for waits in the lists that were looked at.
local waits

-- Return the hints of a message, and when it was queued.
local function hints_of(raw)
  local at = queued_at(raw)
  if not at then return {}, 0 end
  local front = string.sub(raw, 1, (string.find(raw, '"body"', 1, true) or 1) - 1)
  return {type = string.match(front, '"x": "([^"]*)"'), model = string.match(front, '"m": "([^"]*)"'),
    limit = string.match(front, '"t": ([%d.]+)'), session = string.match(front, '"s": "([^"]*)"'),
    secrets = string.match(front, '"k": "([^"]*)"')}, tonumber(at)
end

-- Whether a task that has failed here is left to others (yield.lua).
local avoided = prefix_of(ready) .. 'gpuflow.avoided'
local any_avoided = redis.call('ZCARD', avoided) > 0
local worker = string.match(ARGV[1], '^(.*):') or ARGV[1]
local function is_avoided(raw)
  local tag = string.match(raw, '"delivery_tag": "([^"]*)"')
  local until_ = tag and redis.call('ZSCORE', avoided, tag .. '\n' .. worker)
  return until_ and tonumber(until_) > now
end

-- Whether a message is of a replica (routing/offers.py) of a model of which one is here.
local function is_second(hints)
  return hints.session and kept[hints.session] ~= nil and string.sub(hints.type or '', -5) == '~warm'
end

-- Whether a second replica of a model may be opened here: on GPUs of its own, when no other worker has taken it in time.
local function may_double(hints, at, raw)
  if not kept[hints.session] then return false end
  local tag = string.match(raw, '"delivery_tag": "([^"]*)"')
  local returned = tag and redis.call('ZSCORE', KEYS[5], tag)
  return now - math.max(at, tonumber(returned or '0')) >= LONGEST * look.patience
end

local function may_take(hints, at, most_seconds, mine, raw)
  if most_seconds >= 0 and not (hints.limit and tonumber(hints.limit) <= most_seconds) then return false end
  local limited = hints.type and (look.types or string.find(hints.type, '.', 1, true))
  if limited and not mine[hints.type] then return false end
  if secrets and hints.secrets then
    for name in string.gmatch(hints.secrets, '[^,]+') do
      if not secrets[name] then return false end
    end
  end
  if is_second(hints) then return may_double(hints, at, raw) end
  if hints.session and full[hints.session] then return false end
  if hints.model and not models[hints.model] and now - at < look.patience then
    return redis.call('EXISTS', prefix_of(ready) .. 'gpuflow.warm:' .. hints.model) == 0
  end
  return true
end

-- Return the message of one list that this worker should take next, and when it was queued.
local function best_of(list, most_seconds, mine, warm_only, yields)
  local first, first_at
  for depth = 1, DEPTH do
    local raw = redis.call('LINDEX', list, -depth)
    if not raw then break end
    local hints, at = hints_of(raw)
    local second = is_second(hints)
    local warm = hints.session and sessions[hints.session] and not second
    local mine_now = may_take(hints, at, most_seconds, mine, raw) and not (any_avoided and is_avoided(raw))
    if mine_now and warm_only and not warm then
      local comes = hints.session and here[hints.session] and not second
      if not comes then cold[queue_of(ready, list)] = true end
      waits = waits or yields and not comes
      if yields and not comes and now - at > LONGEST * look.patience then
        stuck = math.min(stuck or at, at)
        break
      end
    elseif mine_now then
      if not choosy or warm or (hints.model and models[hints.model]) then return raw, at end
      if not first then first, first_at = raw, at end
      if now - first_at > LONGEST * look.patience then break end
    end
  end
  return first, first_at
end

local function tag_of(raw)
  -- Where kombu writes it. If it is another's the consumer sees that; to parse all of the message here takes long.
  local last = string.match(string.sub(raw, -80), '"delivery_tag": "([^"\\]+)"}}$')
  if last then return last end
  local ok, message = pcall(cjson.decode, raw)
  -- What is nested too deeply for this parser may still be told of by the consumer, which knows of which task it is.
  if not ok then return string.match(raw, '"delivery_tag": "([^"]+)"') end
  local tag = type(message) == 'table' and type(message['properties']) == 'table' and message['properties']['delivery_tag']
  return type(tag) == 'string' and tag
end

-- Whether anything waits in some of the lists: one command for many, as most of them are empty.
local function any_waits(first, last)
  return last - first >= MANY or redis.call('EXISTS', unpack(KEYS, first, last)) > 0
end

-- Return the best message of one priority, and its list.
local function best_from(first)
  local heads, best = {}, nil
  if not any_waits(first, first + look.queues - 1) then return end
  for i = 0, look.queues - 1 do
    local mine = look.with_gpus and look.with_gpus[i + 1] and gpu_types or types
    local warm_only = look.warm_only and look.warm_only[i + 1]
    local yields = look.yields and look.yields[i + 1]
    local found, queued = best_of(KEYS[first + i], look.limits[i + 1], mine, warm_only, yields)
    heads[#heads + 1] = found and {list = KEYS[first + i], raw = found, at = queued, warm_only = warm_only}
  end
  for _, head in ipairs(heads) do
    local may = not (head.warm_only and stuck and stuck < head.at)
    if may and (not best or head.at < best.at) then best = head end
  end
  if waits then stuck = 0 end
  if best then return best.list, best.raw end
end

local aside = {0, '', ''}
local function take()
  if look.queues == 0 or not any_waits(8, #KEYS) then return end
  for first = 8, #KEYS, look.queues do
    local list, raw = best_from(first)
    while list do
      take_out(ready, list, raw)
      local tag = tag_of(raw)
      local taken = tag and redis.call('HEXISTS', KEYS[2], tag) == 1
      if tag and not taken then
        redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), tag)
        redis.call('HSET', KEYS[2], tag, raw)
        redis.call('HSET', KEYS[3], tag, ARGV[1] .. '\n' .. list)
        return list, raw, tag
      end
      local why = taken and 'a message with its delivery tag is at work' or NO_TAG
      set_aside(ready, list, raw, why)
      aside = {aside[1] + 1, list, why}
      list, raw = best_from(first)
    end
  end
end

local lost = {}
for place = 4, #ARGV, 4 do
  if list_of_lease(KEYS[3], ready, ARGV[place], ARGV[1], ARGV[place + 1]) then
    forget_return(ready, ARGV[place])
    use_signature(ready, ARGV[place + 2], ARGV[place + 3])
    end_lease(KEYS[1], KEYS[2], KEYS[3], ARGV[place])
  else
    lost[#lost + 1] = ARGV[place]
  end
end

local list, raw, tag
if tonumber(redis.call('HGET', KEYS[6], 'hold') or '0') <= now then list, raw, tag = take() end
if not list then
  local hops, queue = string.match(look.pass_on, '^(%d+) (.*)$')
  if hops and tonumber(hops) > 0 and redis.call('ZSCORE', ready, queue) then
    ring(ready, queue, look.bell, hops - 1)
  end
end
for _, group in ipairs(look.groups) do
  redis.call(list and 'SREM' or 'SADD', prefix_of(ready) .. 'gpuflow.waiters:' .. group, KEYS[7])
end
local names = look.page > 0 and redis.call('ZRANGE', ready, 0, look.page - 1) or {}
local queues = {}
for queue in pairs(cold) do queues[#queues + 1] = queue end
return {list or '', raw or '', names, queues, tag or '', tag and redis.call('ZSCORE', KEYS[5], tag) or '0', lost,
  aside}
