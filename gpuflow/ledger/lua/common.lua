-- What the steps of the ledger share. Stands before each of them, after the table of allowed moves.
local function clock()
  local now = redis.call('TIME')
  return string.format('%d.%06d', now[1], now[2])
end

-- Whether an attempt works on the task.
local function runs(state) return state == 'STARTING' or state == 'RUNNING' end

local function tell(events, cap, event)
  redis.call('XADD', events, 'MAXLEN', '~', cap, '*', 'event', cjson.encode(event))
end

-- Note how the attempt that the record names has ended (`outcome`), with its error and the tail of its log, JSON.
local function remember(record, attempts, seconds, outcome, error, log_tail)
  local attempt, worker, started = unpack(redis.call('HMGET', record, 'attempt', 'worker', 'started_at'))
  local entry = {attempt = tonumber(attempt), worker = worker or '', startedAt = tonumber(started or '0'),
    endedAt = tonumber(seconds), outcome = outcome}
  if error ~= '' then entry['error'] = cjson.decode(error) end
  if log_tail ~= '' then entry['logTail'] = log_tail end
  redis.call('HSET', attempts, attempt, cjson.encode(entry))
end

-- Make the record final.
local function finish(record, events, attempts, dead, unfinished, cap, ttl, seconds, state, error)
  redis.call('HSET', record, 'state', state, 'finished_at', seconds, 'updated_at', seconds)
  if error ~= '' then redis.call('HSET', record, 'error', error) end
  redis.call('HDEL', record, 'tag', 'owner_token', 'cancel_requested', 'not_before')
  local id, attempt = unpack(redis.call('HMGET', record, 'id', 'attempt'))
  redis.call('SREM', unfinished, id)
  local event = {event = 'state', state = state, attempt = tonumber(attempt or '0')}
  if error ~= '' then event['error'] = cjson.decode(error) end
  tell(events, cap, event)
  for _, key in ipairs({record, events, attempts}) do redis.call('EXPIRE', key, ttl) end
  if state == 'DEAD' then redis.call('ZADD', dead, seconds, id) end
end
