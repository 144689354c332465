-- COMMIT: the final state of a task, by its current attempt only. Compare-and-set; the fence of promise 2.
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] attempts of the task  KEYS[4] gpuflow.dead
-- KEYS[5] gpuflow.unfinished
-- ARGV[1] final state  ARGV[2] attempt, or '' for a task that no attempt runs  ARGV[3] owner token of the attempt
-- ARGV[4] result JSON or ''  ARGV[5] error JSON or ''  ARGV[6] digest of the manifest or ''
-- ARGV[7] tail of the attempt's log or ''  ARGV[8] cap of the event stream
-- ARGV[9] seconds until the record and its events expire  ARGV[10] id of this call
-- ARGV[11] what the attempt has used, JSON (ledger.records.Usage), or ''
--
-- Returns 1 committed, 2 this very commit was made before (replay the tail), 0 refused: nothing was changed.
local state, attempt, token = unpack(redis.call('HMGET', KEYS[1], 'state', 'attempt', 'owner_token'))
if not state then return 0 end
if ARGV[2] ~= '' and (attempt or '0') ~= ARGV[2] then return 0 end
if ARGV[2] == '' and answer_to(KEYS[1], 'commit', ARGV[10]) then return 2 end
if is_final(state) and state ~= ARGV[1] then return 0 end
if is_final(state) then
  -- Sent again after a retry by hand, it must not end the new life of the task.
  if ARGV[2] == '' then note_answer(KEYS[1], 'commit', ARGV[10], ARGV[1]) end
  return 2
end
-- An attempt commits only while it runs: after a retry by hand the record waits again, under the same number.
if runs(state) ~= (ARGV[2] ~= '') then return 0 end
if ARGV[2] ~= '' and token ~= ARGV[3] then return 0 end
if not may_move(state, ARGV[1]) then return 0 end
local seconds = clock()
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'result', ARGV[4]) end
if ARGV[6] ~= '' then redis.call('HSET', KEYS[1], 'manifest', ARGV[6]) end
if ARGV[2] ~= '' and ARGV[1] == 'SUCCEEDED' then measure(KEYS[1], seconds) end
if ARGV[2] ~= '' then remember(KEYS[1], KEYS[3], seconds, string.lower(ARGV[1]), ARGV[5], ARGV[7], ARGV[11]) end
finish(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], ARGV[8], ARGV[9], seconds, ARGV[1], ARGV[5])
if ARGV[2] == '' then note_answer(KEYS[1], 'commit', ARGV[10], ARGV[1]) end
return 1
