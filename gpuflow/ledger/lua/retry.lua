-- Queue an ended task again (by hand): a new life of the same id; attempt numbers go on, never back.
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] gpuflow.ready  KEYS[4] Celery's result of the task
-- KEYS[5] attempts of the task  KEYS[6] gpuflow.dead  KEYS[7] gpuflow.unfinished
-- ARGV[1] new delivery tag, which is also the id of this call  ARGV[2] cap of the event stream  ARGV[3] doorbell token seconds
-- ARGV[4] who acts
-- ARGV[5], ARGV[6] the message that the caller has seen in the record, and the same with the new tag, signed; without them,
-- nothing is signed
--
-- A caller of a merged run runs by itself then; a run is not queued again: it has no callers left.
--
-- Returns 1 queued, 0 it has not ended or has succeeded, -1 unknown or without its message, -2 a run of merged calls,
-- -4 the record has another message by now, -3 a replica of a served model: there may be another in its place.
local state, list, message, id = unpack(redis.call('HMGET', KEYS[1], 'state', 'list', 'message', 'id'))
if not state or not list or not message then return -1 end
if answer_to(KEYS[1], 'requeue', ARGV[1]) then return 1 end
if redis.call('HEXISTS', KEYS[1], 'merge_tokens') == 1 then return -2 end
if redis.call('HEXISTS', KEYS[1], 'replica_of') == 1 then return -3 end
if not is_final(state) or not may_move(state, 'QUEUED') then return 0 end
if ARGV[5] then
  if message ~= ARGV[5] then return -4 end
  message = ARGV[6]
end
local old = cjson.decode(message)['properties']['delivery_tag']
local from, to = string.find(message, old, 1, true)
message = string.sub(message, 1, from - 1) .. ARGV[1] .. string.sub(message, to + 1)
local seconds = clock()
if queued_at(message) then message = stamped('{' .. string.gsub(message, '^[^,]*,', ''), seconds, '') end
redis.call('HSET', KEYS[1], 'state', 'QUEUED', 'message', message, 'updated_at', seconds, 'requeued_at', seconds)
redis.call('HDEL', KEYS[1], 'finished_at', 'error', 'progress', 'result', 'tag', 'owner_token', 'cancel_requested',
  'failures', 'losses', 'preemptions', 'alone', 'not_before', 'avoid_worker', 'avoid_until', 'run', 'call', 'fetches')
for _, key in ipairs({KEYS[1], KEYS[2], KEYS[5]}) do redis.call('PERSIST', key) end
redis.call('DEL', KEYS[4])
redis.call('ZREM', KEYS[6], id)
redis.call('SADD', KEYS[7], id)
tell(KEYS[2], ARGV[2], {event = 'state', state = 'QUEUED'})
local task_type, in_queue = unpack(redis.call('HMGET', KEYS[1], 'task_type', 'queue'))
count(prefix_of(KEYS[3]), 1, 'submitted', '', task_type, in_queue or '')
local pause = redis.call('HGET', KEYS[1], 'fallback_seconds')
if pause then fall_back_in(KEYS[3], id, pause) end
-- The queue may have been forgotten meanwhile, and with it what the name alone does not say.
local queue, requirement = unpack(redis.call('HMGET', KEYS[1], 'queue', 'requirement'))
if queue and requirement then register(KEYS[3], queue, requirement, seconds) end
put(KEYS[3], list, 'back', message, ARGV[3])
note_answer(KEYS[1], 'requeue', ARGV[1], 'queued')
audit(prefix_of(KEYS[3]) .. 'gpuflow.audit', 'task.retry', ARGV[4], 'task:' .. id, 'from', state)
return 1
