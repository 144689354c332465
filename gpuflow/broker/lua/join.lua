-- Join: one call that may be merged. Its record, and a place in a run: one that is there, or one of its own with its
-- message, in one step. No call is without a run, and no run without a call.
--
-- KEYS[1] list of the run's message, by the call's queue and priority  KEYS[2] gpuflow.ready
-- KEYS[3] record of the caller  KEYS[4] its events  KEYS[5] gpuflow.tasks  KEYS[6] gpuflow.unfinished
-- KEYS[7] list of gpuflow.control  KEYS[8] gpuflow.merge
-- ARGV[1] JSON:
--   caller, run      ids: of the call, and of the run that it begins if it finds none
--   call, batch      digests: of the call, and of what calls of one run share ('' for none)
--   tokens           estimate of the call; max_calls, max_tokens: what one run may hold
--   priority         0..9     result_ttl   seconds for which a result may be used again
--   retention        seconds that a final record is kept
--   queue, requirement        of the call ('' for one of a plain queue); fallback_seconds: see publish.lua
--   bell             seconds that a doorbell token may lie unread
-- ARGV[2] message of the caller  ARGV[3] message of the run  ARGV[4] message of the caller as it goes to gpuflow.control
-- ARGV[5] hints of the message (common.lua)  ARGV[6] spec of the call, JSON
-- ARGV[7] fields of the caller's record, JSON object of strings  ARGV[8] those of the run's record
--
-- The keys of a run (all derived from the prefix; see broker/keys.py):
--   merge:call:<digest>             the run that answers this call, or holds its result
--   merge:batch:<digest>            the run that takes compatible calls while it waits
--   merge:<run>:calls               digest -> spec of each different call
--   merge:<run>:callers:<digest>    the callers of one call that have not been told of its end
--
-- States: a caller is MERGED until its run has ended. A run takes further different calls only while it is QUEUED for its
-- first attempt; equal ones until it has ended; and after that as long as its result may be used again.
--
-- Returns {how, run}: 'new', 'coalesced', 'batched', 'hit' (the result is there; the caller's message goes to
-- gpuflow.control and fetches it), or 'repeated': the call was made before, and nothing was changed.
local ready, options = KEYS[2], cjson.decode(ARGV[1])
local prefix = prefix_of(ready)
local known = redis.call('HMGET', KEYS[3], 'state', 'run')
if known[1] then return {'repeated', known[2] or ''} end
local now = redis.call('TIME')
local seconds = string.format('%d.%06d', now[1], now[2])

local function run_key(run, what) return prefix .. 'merge:' .. run .. ':' .. what end

local function run_record(run) return prefix .. 'task:' .. run end

-- Whether a run that has succeeded has a result of this call, and no error: while its callers are told, its key says
-- nothing of that.
local function has_result(run)
  if redis.call('PTTL', prefix .. 'merge:call:' .. options.call) > 0 then return true end
  local ok, result = pcall(cjson.decode, redis.call('HGET', run_record(run), 'result') or '')
  local children = ok and type(result) == 'table' and result.children
  local child = type(children) == 'table' and children[options.call]
  if type(child) ~= 'table' then return false end
  local name, error = next(child)
  local failed = name == 'error' and next(child, name) == nil and type(error) == 'table'
  return not (failed and error.type ~= nil and error.message ~= nil)
end

-- Return a run for this call, and how it is joined.
local function find_run()
  local run = redis.call('GET', prefix .. 'merge:call:' .. options.call)
  if run then
    local state, finished, cancelled = unpack(redis.call('HMGET', run_record(run),
      'state', 'finished_at', 'cancel_requested'))
    local age = finished and seconds - finished
    if state == 'SUCCEEDED' and options.result_ttl > 0 and age <= options.result_ttl and has_result(run) then
      return run, 'hit'
    end
    local open = state == 'QUEUED' or state == 'STARTING' or state == 'RUNNING'
    if open and not cancelled and redis.call('HEXISTS', run_key(run, 'calls'), options.call) == 1 then
      return run, 'coalesced'
    end
  end
  run = options.batch ~= '' and options.max_calls > 1 and redis.call('GET', prefix .. 'merge:batch:' .. options.batch)
  if run then
    local state, attempt, tokens = unpack(redis.call('HMGET', run_record(run), 'state', 'attempt', 'merge_tokens'))
    if state == 'QUEUED' and attempt == '0' and tonumber(tokens) + options.tokens <= options.max_tokens
      and redis.call('HLEN', run_key(run, 'calls')) < options.max_calls then
      return run, 'batched'
    end
  end
end

-- Write a record with what all records have.
local function write(record, id, queue, list, message, fields)
  local flat = {}
  for name, value in pairs(fields) do flat[#flat + 1], flat[#flat + 2] = name, value end
  redis.call('HSET', record, 'id', id, 'queue', queue, 'created_at', seconds, 'updated_at', seconds,
    'message', message, 'list', list, unpack(flat))
  redis.call('ZADD', KEYS[5], seconds, id)
  redis.call('SADD', KEYS[6], id)
end

-- The text of a message as it waits: one of a demand queue is stamped.
local function queued(message)
  return options.requirement ~= '' and stamped(message, seconds, ARGV[5]) or message
end

local function begin_run()
  local run, record = options.run, run_record(options.run)
  local message = queued(ARGV[3])
  write(record, run, options.queue, KEYS[1], message, cjson.decode(ARGV[8]))
  redis.call('HSET', record, 'merge_tokens', 0, 'priority', options.priority)
  if options.fallback_seconds ~= '' then fall_back_in(ready, run, options.fallback_seconds) end
  redis.call('XADD', prefix .. 'events:' .. run, '*', 'event',
    cjson.encode({event = 'state', state = 'QUEUED', queue = options.queue}))
  if options.batch ~= '' then redis.call('SET', prefix .. 'merge:batch:' .. options.batch, run) end
  redis.call('HSET', record, 'merge_batch', options.batch)
  put(ready, KEYS[1], 'back', message, options.bell)
  return run
end

-- Let a run that waits be taken as early as its most urgent call.
local function raise_priority(run)
  local record = run_record(run)
  local state, list, message, priority = unpack(redis.call('HMGET', record, 'state', 'list', 'message', 'priority'))
  if state ~= 'QUEUED' or tonumber(priority or '5') >= options.priority or not take_out(ready, list, message) then
    return
  end
  -- It may have moved on to the queue of another alternative.
  local higher = prefix .. queue_of(ready, list) .. string.sub(KEYS[1], #prefix + #options.queue + 1)
  redis.call('HSET', record, 'list', higher, 'priority', options.priority)
  put(ready, higher, 'back', message, options.bell)
end

if options.requirement ~= '' then register(ready, options.queue, options.requirement, seconds) end
local run, how = find_run()
if not run then run, how = begin_run(), 'new' end
local fields = cjson.decode(ARGV[7])
write(KEYS[3], options.caller, options.queue, KEYS[1], queued(ARGV[2]), fields)
count(prefix, 1, 'submitted', '', fields.task_type, options.queue)
redis.call('HSET', KEYS[3], 'state', 'MERGED', 'run', run, 'call', options.call)
redis.call('SADD', run_key(run, 'callers:' .. options.call), options.caller)
redis.call('XADD', KEYS[4], '*', 'event', 
  cjson.encode({event = 'state', state = 'MERGED', run = run, call = options.call, how = how}))
if how == 'new' or how == 'batched' then
  redis.call('HSET', run_key(run, 'calls'), options.call, ARGV[6])
  redis.call('SET', prefix .. 'merge:call:' .. options.call, run)
  redis.call('HINCRBY', run_record(run), 'merge_tokens', options.tokens)
end
if how ~= 'hit' then
  local ttl = tonumber(redis.call('HGET', run_record(run), 'result_ttl') or '0')
  if options.result_ttl > ttl then redis.call('HSET', run_record(run), 'result_ttl', options.result_ttl) end
  if how ~= 'new' then raise_priority(run) end
else
  -- Its message is on its way: whoever completes the run for another caller leaves the rest to it.
  redis.call('HSET', KEYS[3], 'fetches', '1')
  for _, key in ipairs({run_record(run), prefix .. 'events:' .. run, prefix .. 'task:' .. run .. ':attempts'}) do
    if redis.call('TTL', key) > 0 then redis.call('EXPIRE', key, options.retention) end
  end
  put(ready, KEYS[7], 'back', ARGV[4], options.bell)
end
redis.call('HINCRBY', KEYS[8], 'calls', 1)
redis.call('HINCRBY', KEYS[8], how, 1)
return {how, run}
