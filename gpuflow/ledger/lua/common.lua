-- What the steps of the ledger share. Stands before each of them, after the table of allowed moves.
local function clock()
  local now = redis.call('TIME')
  return string.format('%d.%06d', now[1], now[2])
end

-- Who acts, for the audit log; nil: the worker that the record of the task names.
local acting

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

-- The prefix of all keys, by the record of a task.
local function prefix_before(record, id) return string.sub(record, 1, -#id - #'task:' - 1) end

-- Add what an attempt has used (`ledger.records.Usage`) to that of its task, and to the counts of the fleet; its amounts,
-- and their sums, are kept within bounds.
local USED = {gpuSeconds = 'gpu_ms', energyJoules = 'energy_mj', cost = 'cost_millionths',
  artifactBytes = 'artifact_bytes'}
local UNITS = {gpuSeconds = 1e3, energyJoules = 1e3, cost = 1e6, artifactBytes = 1}
local MOST_USED = 1e15

-- A number that can be encoded; 0 for what is none. The step has written already and must not raise.
local function bounded(given)
  local number = tonumber(given) or 0
  return number == number and math.max(-MOST_USED, math.min(MOST_USED, number)) or 0
end

local function add_usage(record, prefix, task_type, used)
  local total = cjson.decode(redis.call('HGET', record, 'usage') or '{}')
  for name, given in pairs(used) do
    local amount = bounded(given)
    used[name] = amount
    total[name] = bounded(bounded(total[name]) + amount)
    if USED[name] then
      count(prefix, string.format('%.0f', math.max(0, amount) * UNITS[name]), USED[name], '', task_type)
    end
  end
  redis.call('HSET', record, 'usage', cjson.encode(total))
end

-- Note how the attempt that the record names has ended (`outcome`), with its error, the tail of its log, JSON, and what
-- it has used, JSON or ''; nobody knows that of a lost one.
local function remember(record, attempts, seconds, outcome, error, log_tail, usage)
  local attempt, worker, started, id, task_type = unpack(redis.call('HMGET', record,
    'attempt', 'worker', 'started_at', 'id', 'task_type'))
  local prefix = prefix_before(record, id)
  local entry = {attempt = tonumber(attempt), worker = worker or '', startedAt = tonumber(started or '0'),
    endedAt = tonumber(seconds), outcome = outcome}
  if error ~= '' then entry['error'] = cjson.decode(error) end
  if log_tail ~= '' then entry['logTail'] = log_tail end
  if (usage or '') ~= '' then
    entry['usage'] = cjson.decode(usage)
    add_usage(record, prefix, task_type, entry['usage'])
  end
  redis.call('HSET', attempts, attempt, cjson.encode(entry))
  count(prefix, 1, 'attempts', outcome, task_type)
  if outcome == 'succeeded' then observe(prefix, 'run', task_type, tonumber(seconds) - tonumber(started or seconds)) end
end

-- Whether a pipeline that has not ended needs the record: a later stage, or a resume, may read its result.
-- Its end lets the record expire (pipeline_end.lua).
local function is_needed(record, id)
  local pipeline = redis.call('HGET', record, 'pipeline')
  return pipeline and redis.call('HGET', prefix_before(record, id) .. 'pipeline:' .. pipeline, 'state') == 'RUNNING'
end

-- Keep the mean time that attempts of a demand queue take, the newest for a fifth of it: what scaling plans with.
local function measure(record, seconds)
  local id, queue, started = unpack(redis.call('HMGET', record, 'id', 'queue', 'started_at'))
  local key = prefix_before(record, id) .. 'queue:' .. (queue or '')
  local name, mean = unpack(redis.call('HMGET', key, 'name', 'task_seconds'))
  if not started or not name then return end
  local took = math.max(0, tonumber(seconds) - tonumber(started))
  redis.call('HSET', key, 'task_seconds', string.format('%.3f', mean and 0.8 * tonumber(mean) + 0.2 * took or took))
end

local leave_run

-- Keep what a run that has ended was joined by no longer than its record: its completion removes it before.
local function expire_run(prefix, run, ttl)
  local keys = prefix .. 'merge:' .. run .. ':'
  for _, call in ipairs(redis.call('HKEYS', keys .. 'calls')) do redis.call('EXPIRE', keys .. 'callers:' .. call, ttl) end
  redis.call('EXPIRE', keys .. 'calls', ttl)
end

-- Let nobody join a run any more by these of its calls, nor by its batch (broker/lua/join.lua).
local function bar(prefix, run, calls, batch)
  for _, call in ipairs(calls) do
    if redis.call('GET', prefix .. 'merge:call:' .. call) == run then redis.call('DEL', prefix .. 'merge:call:' .. call) end
  end
  if batch and redis.call('GET', prefix .. 'merge:batch:' .. batch) == run then
    redis.call('DEL', prefix .. 'merge:batch:' .. batch)
  end
end

-- Make the record final. It expires after `ttl` seconds, or so long after the end of its pipeline. Of a run, only a
-- success can still be joined; the calls that it had are kept as long as its record.
local function finish(record, events, attempts, dead, unfinished, cap, ttl, seconds, state, error)
  local before, run, call, tokens, batch = unpack(redis.call('HMGET', record,
    'state', 'run', 'call', 'merge_tokens', 'merge_batch'))
  redis.call('HSET', record, 'state', state, 'finished_at', seconds, 'updated_at', seconds)
  if error ~= '' then redis.call('HSET', record, 'error', error) end
  redis.call('HDEL', record, 'tag', 'owner_token', 'cancel_requested', 'not_before', 'fetches')
  local id, attempt, worker, task_type, queue = unpack(redis.call('HMGET', record,
    'id', 'attempt', 'worker', 'task_type', 'queue'))
  local prefix = prefix_before(record, id)
  audit(prefix .. 'gpuflow.audit', 'task.end', acting or 'worker:' .. (worker or ''), 'task:' .. id,
    'state', state, 'attempt', attempt or '0')
  redis.call('SREM', unfinished, id)
  if not tokens then count(prefix, 1, 'ended', state, task_type, queue or '') end
  local event = {event = 'state', state = state, attempt = tonumber(attempt or '0')}
  if error ~= '' then event['error'] = cjson.decode(error) end
  tell(events, cap, event)
  if not is_needed(record, id) then
    for _, key in ipairs({record, events, attempts}) do redis.call('EXPIRE', key, ttl) end
  end
  if state == 'DEAD' and not tokens then redis.call('ZADD', dead, seconds, id) end
  if tokens then
    if state ~= 'SUCCEEDED' then bar(prefix, id, redis.call('HKEYS', prefix .. 'merge:' .. id .. ':calls'), batch) end
    expire_run(prefix, id, ttl)
  end
  if before == 'MERGED' then leave_run(prefix, id, run, call, dead, unfinished, cap, ttl, seconds) end
end

-- End a task that no attempt runs: its message is taken away. One that somebody holds is told apart from its earlier
-- deliveries as before: its acknowledgement ends that.
local function take_message(ready, delayed, parked, record)
  local list, message = unpack(redis.call('HMGET', record, 'list', 'message'))
  if not list or not message then return end
  take_out(ready, list, message)
  local tag = cjson.decode(message)['properties']['delivery_tag']
  redis.call('ZREM', delayed, tag)
  redis.call('HDEL', parked, tag)
  if redis.call('HEXISTS', prefix_of(ready) .. 'gpuflow.owners', tag) == 0 then forget_return(ready, tag) end
end

local function cancelled_error(message) return cjson.encode({type = 'Cancelled', message = message, retryable = false}) end

-- A caller has ended before it got the end of the run that it was merged into (broker/lua/join.lua). The run stops when
-- nobody is left: at once while it waits, by request while it runs.
leave_run = function(prefix, id, run, call, dead, unfinished, cap, ttl, seconds)
  local record, keys = prefix .. 'task:' .. run, prefix .. 'merge:' .. run .. ':'
  redis.call('SREM', keys .. 'callers:' .. call, id)
  local state, batch = unpack(redis.call('HMGET', record, 'state', 'merge_batch'))
  if not state or is_final(state) then return end
  local calls, left = redis.call('HKEYS', keys .. 'calls'), 0
  for _, one in ipairs(calls) do left = left + redis.call('SCARD', keys .. 'callers:' .. one) end
  if left > 0 then
    if not runs(state) and redis.call('SCARD', keys .. 'callers:' .. call) == 0 then
      bar(prefix, run, {call}, nil)
      redis.call('HDEL', keys .. 'calls', call)
    end
    return
  end
  bar(prefix, run, calls, batch)
  redis.call('DEL', keys .. 'calls')
  if runs(state) then
    redis.call('HSETNX', record, 'cancel_requested', seconds)
    return
  end
  take_message(prefix .. 'gpuflow.ready', prefix .. 'gpuflow.delayed', prefix .. 'gpuflow.parked', record)
  finish(record, prefix .. 'events:' .. run, record .. ':attempts', dead, unfinished, cap, ttl, seconds, 'CANCELLED',
    cancelled_error('every caller of this run has left'))
end
