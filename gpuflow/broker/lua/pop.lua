-- Look, then take: lease the most urgent message of some queues; of equally urgent ones, the one queued first.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.ready
-- KEYS[5] gpuflow.unreadable  KEYS[6] gpuflow.sweep  KEYS[7] doorbell of this consumer
-- KEYS[8..] lists: those of priority 9, then those of 8, ..., in each the same number of queues
-- ARGV[1] owner token  ARGV[2] lease in seconds  ARGV[3] number of queues
-- ARGV[4] how many names of the ready index to return, best first
-- ARGV[5] '<hops> <queue>' that this consumer was woken for and cannot serve now, or ''
-- ARGV[6] doorbell token seconds  ARGV[7..] groups of waiters: plain queues, and the class of this worker
--
-- Returns {list, message, names}; with '' for both when nothing was taken: then the doorbell is registered in the same
-- step, so that no publish is missed, and another waiter is woken for the queue of ARGV[5].
-- Nothing is taken while the fleet gathers after a new server run (arrive.lua).
-- A message that is not JSON with a delivery tag goes to the unreadable list as it is and is never lost.
local ready = KEYS[4]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local width = tonumber(ARGV[3])

local function oldest_head(first)
  local list, raw, at
  for i = first, first + width - 1 do
    local head = redis.call('LINDEX', KEYS[i], -1)
    local queued = head and tonumber(queued_at(head) or '0')
    if head and (not list or queued < at) then list, raw, at = KEYS[i], head, queued end
  end
  return list, raw
end

local function tag_of(raw)
  local ok, message = pcall(cjson.decode, raw)
  local tag = ok and type(message) == 'table' and type(message['properties']) == 'table'
    and message['properties']['delivery_tag']
  return type(tag) == 'string' and tag
end

local function take()
  for first = 8, #KEYS, width do
    local list, raw = oldest_head(first)
    while list do
      redis.call('RPOP', list)
      if queued_at(raw) then refresh(ready, queue_of(ready, list)) end
      local tag = tag_of(raw)
      if tag then
        redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), tag)
        redis.call('HSET', KEYS[2], tag, raw)
        redis.call('HSET', KEYS[3], tag, ARGV[1] .. '\n' .. list)
        return list, raw
      end
      redis.call('LPUSH', KEYS[5], raw)
      list, raw = oldest_head(first)
    end
  end
end

local list, raw
if tonumber(redis.call('HGET', KEYS[6], 'hold') or '0') <= now then list, raw = take() end
if list then
  for i = 7, #ARGV do redis.call('SREM', prefix_of(ready) .. 'gpuflow.waiters:' .. ARGV[i], KEYS[7]) end
else
  local hops, queue = string.match(ARGV[5], '^(%d+) (.*)$')
  if hops and tonumber(hops) > 0 and redis.call('ZSCORE', ready, queue) then
    ring(ready, queue, ARGV[6], hops - 1)
  end
  for i = 7, #ARGV do redis.call('SADD', prefix_of(ready) .. 'gpuflow.waiters:' .. ARGV[i], KEYS[7]) end
end
local page = tonumber(ARGV[4])
return {list or '', raw or '', page > 0 and redis.call('ZRANGE', ready, 0, page - 1) or {}}
