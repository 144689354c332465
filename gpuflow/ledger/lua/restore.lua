-- Put the message of a task back that is nowhere: not waiting, not leased, not delayed. Idempotent.
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] attempts of the task  KEYS[4] gpuflow.unacked  KEYS[5] gpuflow.parked
-- KEYS[6] gpuflow.ready  KEYS[7] gpuflow.unfinished
-- ARGV[1] task id  ARGV[2] least age of the record's last change in seconds  ARGV[3] cap of the event stream
-- ARGV[4] doorbell token seconds
--
-- Returns 'restored', or 'restored <attempt>' where that attempt was found lost; 'present' (its message is somewhere); 'young' (a step may be under way); 'final' (it has ended
-- or is unknown, and leaves the set of unfinished tasks); 'lost' (its message was never stored); 'merged' (it has none of
-- its own in a queue: it waits for the end of a run).
local state, list, message, changed = unpack(redis.call('HMGET', KEYS[1], 'state', 'list', 'message', 'updated_at'))
if not state or is_final(state) then
  redis.call('SREM', KEYS[7], ARGV[1])
  return 'final'
end
if state == 'MERGED' then return 'merged' end
local seconds = clock()
if seconds - tonumber(changed or '0') < tonumber(ARGV[2]) then return 'young' end
if not list or not message then return 'lost' end
local tag = cjson.decode(message)['properties']['delivery_tag']
if redis.call('HEXISTS', KEYS[4], tag) == 1 or redis.call('HEXISTS', KEYS[5], tag) == 1 then return 'present' end
if redis.call('LPOS', list, message) then return 'present' end
local lost = ''
if runs(state) then
  remember(KEYS[1], KEYS[3], seconds, 'lost', worker_lost(KEYS[1], 'the lease of the attempt was lost'), '')
  redis.call('HINCRBY', KEYS[1], 'losses', 1)
  lost = ' ' .. redis.call('HGET', KEYS[1], 'attempt')
end
redis.call('HSET', KEYS[1], 'state', 'QUEUED', 'updated_at', seconds)
redis.call('HDEL', KEYS[1], 'tag', 'owner_token', 'worker', 'progress')
tell(KEYS[2], ARGV[3], {event = 'state', state = 'QUEUED', after = 'restored'})
put(KEYS[6], list, 'front', message, ARGV[4])
return 'restored' .. lost
