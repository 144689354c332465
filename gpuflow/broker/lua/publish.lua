-- Publish one message; with a record, submit: record, queue registration and message in one step.
--
-- KEYS[1] list of the message      KEYS[2] gpuflow.waiters
-- with a record, or a queue registration alone:
-- KEYS[3] record hash              KEYS[4] index zset of its kind
-- KEYS[5] gpuflow.queues               KEYS[6] gpuflow.queues_version     KEYS[7] queue:<name>
-- KEYS[8] event stream of the record
-- ARGV[1] message                  ARGV[2] seconds a doorbell token may lie unread
-- ARGV[3] record id, or '' for a queue registration alone
-- ARGV[4] queue name  ARGV[5] requirement JSON or ''  ARGV[6..] field, value, ... of the record
--
-- Returns 1 published, 0 the record exists already (nothing was changed: a repeated submit is harmless).
local now = redis.call('TIME')
local seconds = string.format('%d.%06d', now[1], now[2])
if #ARGV > 2 then
  if ARGV[3] ~= '' and redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
  if ARGV[3] ~= '' then
    local fields = {}
    for i = 6, #ARGV do fields[#fields + 1] = ARGV[i] end
    redis.call('HSET', KEYS[3], 'id', ARGV[3], 'queue', ARGV[4], 'created_at', seconds, 'updated_at', seconds,
      'message', ARGV[1], 'list', KEYS[1], unpack(fields))
    redis.call('ZADD', KEYS[4], seconds, ARGV[3])
    redis.call('XADD', KEYS[8], '*', 'event',
      cjson.encode({event = 'state', state = 'QUEUED', queue = ARGV[4]}))
  end
  if ARGV[5] ~= '' and redis.call('SADD', KEYS[5], ARGV[4]) == 1 then
    redis.call('HSET', KEYS[7], 'name', ARGV[4], 'requirement', ARGV[5], 'created_at', seconds)
    redis.call('INCR', KEYS[6])
  end
end
redis.call('LPUSH', KEYS[1], ARGV[1])
local waiting = redis.call('SMEMBERS', KEYS[2])
for _, bell in ipairs(waiting) do
  redis.call('LPUSH', bell, '1')
  redis.call('EXPIRE', bell, ARGV[2])
end
if #waiting > 0 then redis.call('DEL', KEYS[2]) end
return 1
