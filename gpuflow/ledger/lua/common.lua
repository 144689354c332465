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

-- The error of an attempt whose worker is gone, JSON.
local function worker_lost(record, message)
  return cjson.encode({type = 'WorkerLost', retryable = true,
    message = message or 'worker ' .. (redis.call('HGET', record, 'worker') or '?') .. ' was lost while the attempt ran'})
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

-- Whether a pipeline that has not ended needs the record: a later stage, or a resume, may read its result.
-- Its end lets the record expire (pipeline_end.lua).
local function is_needed(record, id)
  local pipeline = redis.call('HGET', record, 'pipeline')
  local prefix = string.sub(record, 1, -#id - #'task:' - 1)
  return pipeline and redis.call('HGET', prefix .. 'pipeline:' .. pipeline, 'state') == 'RUNNING'
end

-- Make the record final. It expires after `ttl` seconds, or so long after the end of its pipeline.
local function finish(record, events, attempts, dead, unfinished, cap, ttl, seconds, state, error)
  redis.call('HSET', record, 'state', state, 'finished_at', seconds, 'updated_at', seconds)
  if error ~= '' then redis.call('HSET', record, 'error', error) end
  redis.call('HDEL', record, 'tag', 'owner_token', 'cancel_requested', 'not_before')
  local id, attempt = unpack(redis.call('HMGET', record, 'id', 'attempt'))
  redis.call('SREM', unfinished, id)
  local event = {event = 'state', state = state, attempt = tonumber(attempt or '0')}
  if error ~= '' then event['error'] = cjson.decode(error) end
  tell(events, cap, event)
  if not is_needed(record, id) then
    for _, key in ipairs({record, events, attempts}) do redis.call('EXPIRE', key, ttl) end
  end
  if state == 'DEAD' then redis.call('ZADD', dead, seconds, id) end
end
