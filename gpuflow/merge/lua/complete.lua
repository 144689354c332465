-- Complete: callers of one call of a run that has ended get its end. Each is compared and set by itself.
--
-- KEYS[1] record of the run  KEYS[2] merge:<run>:callers:<digest>  KEYS[3] gpuflow.dead  KEYS[4] gpuflow.unfinished
-- KEYS[5] gpuflow.ready  KEYS[6] list of gpuflow.control
-- ARGV[1] id of the run  ARGV[2] cap of the event streams  ARGV[3] seconds until a final record expires
-- ARGV[4] seconds that a doorbell token may lie unread
-- ARGV[5] final state  ARGV[6] error JSON or ''  ARGV[7] digest of the manifest or ''
-- ARGV[8] '1' where messages are signed: that of a caller is used then
-- then for each caller: id, result JSON or '', its message for gpuflow.control, or '' for one that is told by the caller of
-- this step, who takes it out of KEYS[2] then
--
-- Returns the ids of those that are to be told. What has left the run meanwhile, or has ended otherwise, is taken out.
local prefix = prefix_of(KEYS[5])
local run, attempt, worker = ARGV[1], unpack(redis.call('HMGET', KEYS[1], 'attempt', 'worker'))
local seconds, untold = clock(), {}
for i = 9, #ARGV, 3 do
  local id, result, message = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local record = prefix .. 'task:' .. id
  local state, of, fetches = unpack(redis.call('HMGET', record, 'state', 'run', 'fetches'))
  if state == 'MERGED' and of == run then
    -- With the state it is no caller that leaves: it stays in KEYS[2] until it is told.
    redis.call('HSET', record, 'state', ARGV[5], 'attempt', attempt or '0', 'worker', worker or '')
    if ARGV[8] == '1' then use_signature_of(KEYS[5], redis.call('HGET', record, 'message')) end
    if result ~= '' then redis.call('HSET', record, 'result', result) end
    if ARGV[7] ~= '' then redis.call('HSET', record, 'manifest', ARGV[7]) end
    -- Field by field: COPY reaches other databases, so that workers with a token of their own may not use it.
    if redis.call('EXISTS', record .. ':attempts') == 0 then
      local attempts = redis.call('HGETALL', KEYS[1] .. ':attempts')
      for at = 1, #attempts, 2 do redis.call('HSET', record .. ':attempts', attempts[at], attempts[at + 1]) end
    end
    finish(record, prefix .. 'events:' .. id, record .. ':attempts', KEYS[3], KEYS[4], ARGV[2], ARGV[3], seconds, ARGV[5],
      ARGV[6])
    if message ~= '' and not fetches then put(KEYS[5], KEYS[6], 'back', message, ARGV[4]) end
    if message ~= '' or fetches then
      redis.call('SREM', KEYS[2], id)
    else
      untold[#untold + 1] = id
    end
  elseif state == ARGV[5] and of == run and message == '' then
    untold[#untold + 1] = id  -- whoever completed it may have died before it was told
  else
    redis.call('SREM', KEYS[2], id)
  end
end
return untold
