-- START: begin the next attempt, if no attempt holds a live lease. Compare-and-set.
--
-- KEYS[1] task record  KEYS[2] gpuflow.leases  KEYS[3] gpuflow.owners  KEYS[4] events  KEYS[5] tasks index
-- KEYS[6] attempts of the task  KEYS[7] gpuflow.dead  KEYS[8] gpuflow.unfinished  KEYS[9] gpuflow.ready
-- ARGV[1] task id  ARGV[2] worker  ARGV[3] owner token  ARGV[4] delivery tag  ARGV[5] lowest attempt number
-- (one above the attempt folders that exist on disk)  ARGV[6] cap of the event stream
-- ARGV[7] newest schema that this worker reads  ARGV[8] most lost attempts of one task
-- ARGV[9] seconds until a final record expires
-- ARGV[10] id of this call: a repeat, whose first answer was lost, begins nothing again
-- ARGV[11] when the message had last gone back before this delivery, 0 for never (pop.lua): a repeat that comes after
-- the message was returned begins nothing, whoever has it now
-- ARGV[12] '1' for the message of a caller that comes for the end of its run: it begins nothing, as a task that runs by
-- itself now has another message
-- ARGV[13..] field, value, ... of a record to create, for a message of a producer that wrote none; without any, none is
--
-- A task that a user wants cancelled, and whose attempt was lost, ends here.
--
-- Returns {verdict, state, attempt, failures, alone, found}: 'begin'; 'final' (replay the tail and ack);
-- 'live' (another attempt runs: ack and drop); 'lost' (our lease of this delivery has ended: change nothing); 'avoid'
-- (another worker is to take it, give it back); 'newer' (written by a newer version, give it back); 'merged' (a caller that
-- was merged into a run has come for its end); 'gone' (there is no record, and none to create: ack and drop). `found` is
-- '<attempt> <seconds>', or left out: the attempt that this step has found lost, 0 for none, and when the task of an attempt
-- that begins began to wait, or nothing.
local seconds = clock()
acting = 'worker:' .. ARGV[2]
local held = redis.call('HGET', KEYS[3], ARGV[4])
local cut = held and string.find(held, '\n', 1, true)
local ours = held and string.sub(held, 1, cut - 1) == ARGV[3]
if not ours or has_returned(KEYS[9], ARGV[4], ARGV[11]) then
  return {'lost', '', 0, 0, 0}
end
local state = redis.call('HGET', KEYS[1], 'state')
local fetches = ARGV[12] == '1'
if not state and (fetches or #ARGV < 13) then return {'gone', '', 0, 0, 0} end
if not state then
  local fields = {}
  for i = 13, #ARGV do fields[#fields + 1] = ARGV[i] end
  redis.call('HSET', KEYS[1], 'id', ARGV[1], 'created_at', seconds, unpack(fields))
  redis.call('ZADD', KEYS[5], seconds, ARGV[1])
  redis.call('SADD', KEYS[8], ARGV[1])
  local task_type, in_queue = unpack(redis.call('HMGET', KEYS[1], 'task_type', 'queue'))
  count(prefix_of(KEYS[9]), 1, 'submitted', '', task_type, in_queue or '')
  state = 'QUEUED'
end
local schema, attempt, tag, worker, until_, failures, call, alone, task_type, queued_since, not_before = unpack(
  redis.call('HMGET', KEYS[1], 'schema', 'attempt', 'tag', 'avoid_worker', 'avoid_until', 'failures', 'start_call',
    'alone', 'task_type', 'updated_at', 'not_before'))
alone = alone and 1 or 0
attempt, failures = tonumber(attempt or '0'), tonumber(failures or '0')
if tonumber(schema or '1') > tonumber(ARGV[7]) then return {'newer', state, attempt, failures, alone} end
if is_final(state) then return {'final', state, attempt, failures, alone} end
if state == 'MERGED' or fetches then return {'merged', state, attempt, failures, alone} end
if runs(state) and tag == ARGV[4] and call == ARGV[10] then
  return {'begin', state, attempt, failures, alone, redis.call('HGET', KEYS[1], 'start_found') or ''}
end
if runs(state) and tag and tag ~= ARGV[4] then
  local ends = redis.call('ZSCORE', KEYS[2], tag)
  if ends and tonumber(ends) > tonumber(seconds) then return {'live', state, attempt, failures, alone} end
end
if redis.call('HEXISTS', KEYS[1], 'cancel_requested') == 1 then
  if runs(state) then remember(KEYS[1], KEYS[6], seconds, 'lost', worker_lost(KEYS[1]), '') end
  finish(KEYS[1], KEYS[4], KEYS[6], KEYS[7], KEYS[8], ARGV[6], ARGV[9], seconds, 'CANCELLED',
    cancelled_error('cancelled by a user'))
  return {'final', 'CANCELLED', attempt, failures, alone, (runs(state) and attempt or 0) .. ' '}
end
if worker == ARGV[2] and tonumber(until_ or '0') > tonumber(seconds) then
  return {'avoid', state, attempt, failures, alone}
end
if not may_move(state, 'STARTING') then return {'final', state, attempt, failures, alone} end
if runs(state) then
  remember(KEYS[1], KEYS[6], seconds, 'lost', worker_lost(KEYS[1]), '')
  local losses = redis.call('HINCRBY', KEYS[1], 'losses', 1)
  if losses >= tonumber(ARGV[8]) then
    local error = cjson.encode({type = 'WorkerLost', retryable = false,
      message = losses .. ' workers were lost while they ran this task; look for what it does to its machine'})
    finish(KEYS[1], KEYS[4], KEYS[6], KEYS[7], KEYS[8], ARGV[6], ARGV[9], seconds, 'DEAD', error)
    return {'final', 'DEAD', attempt, failures, alone, attempt .. ' '}
  end
end
local found = (runs(state) and attempt or 0) .. ' ' .. (state == 'QUEUED' and queued_since or '')
count(prefix_of(KEYS[9]), 1, 'started', '', task_type)
if state == 'QUEUED' and queued_since then
  observe(prefix_of(KEYS[9]), 'wait', task_type, seconds - math.max(tonumber(queued_since), tonumber(not_before or '0')))
end
attempt = math.max(attempt + 1, tonumber(ARGV[5]))
redis.call('HSET', KEYS[1], 'state', 'STARTING', 'attempt', attempt, 'worker', ARGV[2], 'owner_token', ARGV[3],
  'tag', ARGV[4], 'start_call', ARGV[10], 'start_found', found, 'started_at', seconds, 'updated_at', seconds)
redis.call('HDEL', KEYS[1], 'finished_at', 'error', 'progress', 'not_before', 'avoid_worker', 'avoid_until')
-- Only the worker that failed last is passed over: with two workers both would be, and the task would run nowhere.
if worker then redis.call('ZREM', prefix_of(KEYS[9]) .. 'gpuflow.avoided', ARGV[4] .. '\n' .. worker) end
tell(KEYS[4], ARGV[6], {event = 'state', state = 'STARTING', attempt = attempt, worker = ARGV[2]})
audit(prefix_of(KEYS[9]) .. 'gpuflow.audit', 'attempt.start', acting, 'task:' .. ARGV[1], 'attempt', attempt)
return {'begin', 'STARTING', attempt, failures, alone, found}
