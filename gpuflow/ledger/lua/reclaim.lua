-- Take back leases that nobody holds: they were swept while their owner was cut off or stopped, or an older snapshot
-- of the server does not know them. The work behind them goes on, unless a higher attempt exists.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners
-- KEYS[4] gpuflow.delayed  KEYS[5] gpuflow.parked  KEYS[6] gpuflow.ready
-- KEYS[7], [8], ... one task record for each lease, in their order
-- ARGV[1] owner token (`<worker>:<random>`)  ARGV[2] lease in seconds
-- ARGV[3] 1 after a new server run (its snapshot may be older)
-- then for each lease: delivery tag, list, attempt ('' for work without a record), message
--
-- A message that is taken back leaves the place where it waits in the same step, and the record says again what runs.
-- After a new server run a lease is taken back from another owner too, if the snapshot knows lower attempts alone.
-- Returns the tags that are held again.
local seconds = clock()
local renewed = string.format('%.6f', seconds + ARGV[2])
local new_run = ARGV[3] == '1'
local worker = string.match(ARGV[1], '^(.*):') or ARGV[1]

-- Whether this owner's attempt may go on, by the record.
local function goes_on(record, attempt)
  local state, current, token = unpack(redis.call('HMGET', record, 'state', 'attempt', 'owner_token'))
  if not state then return new_run end
  if is_final(state) then return false end
  current = tonumber(current or '0')
  if current == attempt and runs(state) then return token == ARGV[1] end
  return new_run and current < attempt
end

-- Whether the snapshot is older than this owner's attempt: what it says of the lease was true before.
local function outdated(record, attempt)
  local state, current = unpack(redis.call('HMGET', record, 'state', 'attempt'))
  return new_run and state and not is_final(state) and tonumber(current or '0') < attempt
end

-- Take a message out of wherever it waits; returns whether it did.
local function take_from_waiting(tag, list, raw)
  redis.call('ZREM', KEYS[4], tag)
  local delayed = redis.call('HDEL', KEYS[5], tag) == 1
  return take_out(KEYS[6], list, raw) or delayed
end

-- Whether a lease is this owner's again already: the message has come to it once more since it asked.
local function is_ours(held) return held and string.sub(held, 1, #ARGV[1] + 1) == ARGV[1] .. '\n' end

local kept = {}
for i = 0, (#ARGV - 3) / 4 - 1 do
  local tag, list, attempt, raw = ARGV[4 + i * 4], ARGV[5 + i * 4], ARGV[6 + i * 4], ARGV[7 + i * 4]
  local record = KEYS[7 + i]
  local held = redis.call('HGET', KEYS[3], tag)
  if is_ours(held) and (attempt == '' or goes_on(record, tonumber(attempt))) then
    kept[#kept + 1] = tag
  elseif not held or (attempt ~= '' and outdated(record, tonumber(attempt))) then
    local ours
    if attempt == '' then
      ours = take_from_waiting(tag, list, raw) or new_run
    else
      ours = goes_on(record, tonumber(attempt))
      if ours then
        take_from_waiting(tag, list, raw)
        if redis.call('EXISTS', record) == 1 then
          redis.call('HSET', record, 'state', 'RUNNING', 'attempt', attempt, 'owner_token', ARGV[1], 'tag', tag,
            'worker', worker, 'updated_at', seconds)
        end
      end
    end
    if ours then
      forget_return(KEYS[6], tag)
      redis.call('ZADD', KEYS[1], renewed, tag)
      redis.call('HSET', KEYS[2], tag, raw)
      redis.call('HSET', KEYS[3], tag, ARGV[1] .. '\n' .. list)
      kept[#kept + 1] = tag
    end
  end
end
return kept
