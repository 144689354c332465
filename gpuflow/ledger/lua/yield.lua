-- YIELD: end an attempt without ending its task: the record waits again, and the message is back in its list or
-- delayed, in one step. By the current attempt under its own lease only. Compare-and-set.
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] attempts of the task
-- KEYS[4] gpuflow.leases  KEYS[5] gpuflow.unacked  KEYS[6] gpuflow.owners  KEYS[7] gpuflow.ready
-- KEYS[8] gpuflow.delayed  KEYS[9] gpuflow.parked
-- ARGV[1] attempt  ARGV[2] owner token  ARGV[3] delivery tag  ARGV[4] 'failed' or 'preempted'
-- ARGV[5] error JSON or ''  ARGV[6] tail of the attempt's log or ''  ARGV[7] seconds until it may be taken again
-- ARGV[8] worker that is not to take it, or ''  ARGV[9] for how many seconds
-- ARGV[10] cap of the event stream  ARGV[11] doorbell token seconds
-- ARGV[12] 1: a warm session is to answer it by itself from now on
-- ARGV[13] what the attempt has used, JSON (ledger.records.Usage), or ''
-- ARGV[14] the message that takes the place of the one that was taken, or ''; with it ARGV[15] its list, ARGV[16] its tag,
-- ARGV[17] its queue, ARGV[18] the requirement of that queue, JSON or '', ARGV[19] its hints (common.lua), ARGV[20] the
-- fields of the record that belong to it, a JSON object (broker/publication.py)
--
-- Returns 'queued'; 'cancel' (a user has asked for it: commit CANCELLED instead); 'refused': nothing was changed.
local state, attempt, token = unpack(redis.call('HMGET', KEYS[1], 'state', 'attempt', 'owner_token'))
if not state or not runs(state) or attempt ~= ARGV[1] or token ~= ARGV[2] then return 'refused' end
local held = redis.call('HGET', KEYS[6], ARGV[3])
if not held then return 'refused' end
local cut = string.find(held, '\n', 1, true)
local raw = redis.call('HGET', KEYS[5], ARGV[3])
if string.sub(held, 1, cut - 1) ~= ARGV[2] or not raw then return 'refused' end
if redis.call('HEXISTS', KEYS[1], 'cancel_requested') == 1 then return 'cancel' end
local list, tag, side = string.sub(held, cut + 1), ARGV[3], 'front'
local seconds = clock()
if ARGV[14] ~= '' then
  raw, list, tag, side = ARGV[14], ARGV[15], ARGV[16], 'back'
  if ARGV[18] ~= '' then
    raw = stamped(raw, seconds, ARGV[19])
    register(KEYS[7], ARGV[17], ARGV[18], seconds)
  end
  redis.call('HDEL', KEYS[1], 'alternatives', 'fallback_seconds')
  redis.call('HSET', KEYS[1], 'message', raw, 'list', list, 'queue', ARGV[17])
  for name, value in pairs(cjson.decode(ARGV[20])) do redis.call('HSET', KEYS[1], name, value) end
end
remember(KEYS[1], KEYS[3], seconds, ARGV[4], ARGV[5], ARGV[6], ARGV[13])
redis.call('HINCRBY', KEYS[1], ARGV[4] == 'failed' and 'failures' or 'preemptions', 1)
redis.call('HSET', KEYS[1], 'state', 'QUEUED', 'updated_at', seconds)
redis.call('HDEL', KEYS[1], 'tag', 'owner_token', 'worker', 'progress', 'not_before', 'avoid_worker', 'avoid_until')
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'error', ARGV[5]) end
if ARGV[12] == '1' then redis.call('HSET', KEYS[1], 'alone', '1') end
if ARGV[8] ~= '' then
  local until_ = string.format('%.6f', seconds + ARGV[9])
  redis.call('HSET', KEYS[1], 'avoid_worker', ARGV[8], 'avoid_until', until_)
  redis.call('ZADD', prefix_of(KEYS[7]) .. 'gpuflow.avoided', until_, ARGV[3] .. '\n' .. ARGV[8])
end
local id, fallback = unpack(redis.call('HMGET', KEYS[1], 'id', 'fallback_seconds'))
if fallback then fall_back_in(KEYS[7], id, fallback) end
local pause = tonumber(ARGV[7])
local event = {event = 'state', state = 'QUEUED', attempt = tonumber(attempt), after = ARGV[4]}
if pause > 0 then
  event['delaySeconds'] = pause
  redis.call('HSET', KEYS[1], 'not_before', string.format('%.6f', seconds + pause))
  delay(KEYS[7], KEYS[8], KEYS[9], tag, side, list, raw, pause, ARGV[11])
else
  put(KEYS[7], list, side, raw, ARGV[11])
end
if ARGV[5] ~= '' then event['error'] = cjson.decode(ARGV[5]) end
tell(KEYS[2], ARGV[10], event)
end_lease(KEYS[4], KEYS[5], KEYS[6], ARGV[3])
if tag ~= ARGV[3] then forget_return(KEYS[7], ARGV[3]) end -- that message has ended
return 'queued'
