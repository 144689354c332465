-- Queue an ended task again (by hand): a new life of the same id; attempt numbers go on, never back.
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] gpuflow.waiters  KEYS[4] Celery's result of the task
-- ARGV[1] new delivery tag  ARGV[2] cap of the event stream  ARGV[3] doorbell token seconds
--
-- Returns 1 queued, 0 it has not ended or has succeeded, -1 unknown or without its message.
local state, list, message = unpack(redis.call('HMGET', KEYS[1], 'state', 'list', 'message'))
if not state or not list or not message then return -1 end
if not is_final(state) or not may_move(state, 'QUEUED') then return 0 end
local old = cjson.decode(message)['properties']['delivery_tag']
local from, to = string.find(message, old, 1, true)
message = string.sub(message, 1, from - 1) .. ARGV[1] .. string.sub(message, to + 1)
local now = redis.call('TIME')
local seconds = string.format('%d.%06d', now[1], now[2])
redis.call('HSET', KEYS[1], 'state', 'QUEUED', 'message', message, 'updated_at', seconds)
redis.call('HDEL', KEYS[1], 'finished_at', 'error', 'progress', 'result', 'tag', 'owner_token', 'cancel_requested')
redis.call('PERSIST', KEYS[1])
redis.call('PERSIST', KEYS[2])
redis.call('DEL', KEYS[4])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'event', cjson.encode({event = 'state', state = 'QUEUED'}))
redis.call('LPUSH', list, message)
for _, bell in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  redis.call('LPUSH', bell, '1')
  redis.call('EXPIRE', bell, ARGV[3])
end
redis.call('DEL', KEYS[3])
return 1
