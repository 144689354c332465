-- COMMIT: the final state of a task, by its current attempt only. Compare-and-set; the fence of promise 2.
--
-- KEYS[1] task record  KEYS[2] events
-- ARGV[1] final state  ARGV[2] attempt, or '' for a task that no attempt runs  ARGV[3] result JSON or ''
-- ARGV[4] error JSON or ''  ARGV[5] digest of the manifest or ''  ARGV[6] cap of the event stream
-- ARGV[7] seconds until the record and its events expire
--
-- Returns 1 committed, 2 this very commit was made before (replay the tail), 0 refused: nothing was changed.
local now = redis.call('TIME')
local seconds = string.format('%d.%06d', now[1], now[2])
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 0 end
local attempt = redis.call('HGET', KEYS[1], 'attempt') or '0'
if ARGV[2] ~= '' and attempt ~= ARGV[2] then return 0 end
if is_final(state) then return state == ARGV[1] and 2 or 0 end
if ARGV[2] == '' and (state == 'STARTING' or state == 'RUNNING') then return 0 end
if not may_move(state, ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'finished_at', seconds, 'updated_at', seconds)
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'result', ARGV[3]) end
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'error', ARGV[4]) end
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'manifest', ARGV[5]) end
redis.call('HDEL', KEYS[1], 'tag', 'owner_token', 'cancel_requested')
local event = {event = 'state', state = ARGV[1], attempt = tonumber(attempt)}
if ARGV[4] ~= '' then event['error'] = cjson.decode(ARGV[4]) end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], '*', 'event', cjson.encode(event))
redis.call('EXPIRE', KEYS[1], ARGV[7])
redis.call('EXPIRE', KEYS[2], ARGV[7])
return 1
