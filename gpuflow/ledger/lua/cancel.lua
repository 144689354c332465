-- Cancel a task: at once while it waits, by request while an attempt runs under a live lease. An attempt without one is
-- lost: what it does can be committed no more. A caller of a merged run leaves it (common.lua).
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] attempts of the task  KEYS[4] gpuflow.dead
-- KEYS[5] gpuflow.delayed  KEYS[6] gpuflow.parked  KEYS[7] gpuflow.unfinished  KEYS[8] gpuflow.ready
-- KEYS[9] gpuflow.leases  KEYS[10] gpuflow.unacked  KEYS[11] gpuflow.owners  KEYS[12] gpuflow.untold: what is cancelled
-- here and that Celery has still to be told of
-- ARGV[1] reason  ARGV[2] cap of the event stream  ARGV[3] seconds until a final record expires  ARGV[4] id of this call
-- ARGV[5] who acts
-- ARGV[6] '1': only what somebody has cancelled before, and nobody runs any more
--
-- Returns {verdict, state, lost}: 'cancelled' (its message is taken away in the same step), 'requested' (its
-- worker stops it), 'final' (it has ended already), 'unknown', 'left' (by ARGV[6]). `lost` is the attempt that this step has
-- found lost, or 0.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'unknown', ''} end
if ARGV[6] == '1' and redis.call('HEXISTS', KEYS[1], 'cancel_requested') == 0 then return {'left', state} end
local before = answer_to(KEYS[1], 'cancel', ARGV[4])
if before then return {before, state} end
if is_final(state) then return {'final', state} end
local seconds = clock()
local function noted(verdict)
  audit(prefix_of(KEYS[8]) .. 'gpuflow.audit', 'task.cancel', acting, 'task:' .. redis.call('HGET', KEYS[1], 'id'),
    'verdict', verdict, 'reason', ARGV[1])
end
acting = ARGV[5]
local lost = 0
if runs(state) then
  local tag = redis.call('HGET', KEYS[1], 'tag')
  local ends = tag and redis.call('ZSCORE', KEYS[9], tag)
  if ends and tonumber(ends) > tonumber(seconds) then
    if ARGV[6] == '1' then return {'left', state} end
    redis.call('HSETNX', KEYS[1], 'cancel_requested', seconds)
    note_answer(KEYS[1], 'cancel', ARGV[4], 'requested')
    noted('requested')
    return {'requested', state}
  end
  remember(KEYS[1], KEYS[3], seconds, 'lost', worker_lost(KEYS[1]), '')
  lost = tonumber(redis.call('HGET', KEYS[1], 'attempt'))
  if tag then end_lease(KEYS[9], KEYS[10], KEYS[11], tag) end
end
noted('cancelled')
if state ~= 'MERGED' then take_message(KEYS[8], KEYS[5], KEYS[6], KEYS[1]) end
finish(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[7], ARGV[2], ARGV[3], seconds, 'CANCELLED', cancelled_error(ARGV[1]))
note_answer(KEYS[1], 'cancel', ARGV[4], 'cancelled')
redis.call('ZADD', KEYS[12], seconds, redis.call('HGET', KEYS[1], 'id'))
return {'cancelled', 'CANCELLED', lost}
