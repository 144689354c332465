-- Publish one message; with a record, submit: record, queue registration and message in one step.
--
-- KEYS[1] list of the message  KEYS[2] gpuflow.ready  KEYS[3] gpuflow.delayed  KEYS[4] gpuflow.parked
-- with a record, or a queue registration alone:
-- KEYS[5] record hash            KEYS[6] index zset of its kind  KEYS[7] event stream of the record
-- KEYS[8] gpuflow.unfinished, for a task
-- ARGV[1] message  ARGV[2] seconds a doorbell token may lie unread
-- ARGV[3] seconds to wait before the message can be taken, or ''  ARGV[4] its delivery tag
-- ARGV[5] record id, or '' for a queue registration alone
-- ARGV[6] queue name  ARGV[7] requirement JSON or ''  ARGV[8] hints of the message (common.lua)
-- ARGV[9] seconds until a waiting task moves on to its next alternative, or '' when it has none
-- ARGV[10..] field, value, ... of the record
--
-- Returns 1 published, 0 it was published before (nothing was changed): the record exists, or, of a message without one,
-- it is a repeat whose first answer was lost.
local REPEAT_SECONDS = 60
local now = redis.call('TIME')
local seconds = string.format('%d.%06d', now[1], now[2])
local message = ARGV[1]
if (ARGV[5] or '') == '' then
  local sent = prefix_of(KEYS[2]) .. 'gpuflow.sent:' .. ARGV[4]
  if not redis.call('SET', sent, '', 'NX', 'EX', REPEAT_SECONDS) then return 0 end
end
if #ARGV > 4 then
  if ARGV[5] ~= '' and redis.call('EXISTS', KEYS[5]) == 1 then return 0 end
  if ARGV[7] ~= '' then
    message = stamped(message, seconds, ARGV[8])
    register(KEYS[2], ARGV[6], ARGV[7], seconds)
  end
  if ARGV[5] ~= '' then
    local fields = {}
    for i = 10, #ARGV do fields[#fields + 1] = ARGV[i] end
    redis.call('HSET', KEYS[5], 'id', ARGV[5], 'queue', ARGV[6], 'created_at', seconds, 'updated_at', seconds,
      'message', message, 'list', KEYS[1], unpack(fields))
    redis.call('ZADD', KEYS[6], seconds, ARGV[5])
    if KEYS[8] then
      redis.call('SADD', KEYS[8], ARGV[5])
      count(prefix_of(KEYS[2]), 1, 'submitted', '', redis.call('HGET', KEYS[5], 'task_type'), ARGV[6])
    end
    if ARGV[9] ~= '' then fall_back_in(KEYS[2], ARGV[5], ARGV[9]) end
    redis.call('XADD', KEYS[7], '*', 'event',
      cjson.encode({event = 'state', state = 'QUEUED', queue = ARGV[6]}))
  end
end
if ARGV[3] ~= '' then
  delay(KEYS[2], KEYS[3], KEYS[4], ARGV[4], 'back', KEYS[1], message, tonumber(ARGV[3]), ARGV[2])
  return 1
end
put(KEYS[2], KEYS[1], 'back', message, ARGV[2])
return 1
