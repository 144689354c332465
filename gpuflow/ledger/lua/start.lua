-- START: begin the next attempt, if no attempt holds a live lease. Compare-and-set.
--
-- KEYS[1] task record  KEYS[2] gpuflow.leases  KEYS[3] gpuflow.owners  KEYS[4] events  KEYS[5] tasks index
-- ARGV[1] task id  ARGV[2] worker  ARGV[3] owner token  ARGV[4] delivery tag  ARGV[5] lowest attempt number
-- (one above the attempt folders that exist on disk)  ARGV[6] cap of the event stream
-- ARGV[7..] field, value, ... of a record to create, for a message of a producer that wrote none
--
-- Returns {verdict, state, attempt}: 'begin'; 'final' (replay the tail and ack); 'live' (another attempt runs: ack
-- and drop); 'lost' (our lease of this delivery has passed on: change nothing).
local now = redis.call('TIME')
local seconds = string.format('%d.%06d', now[1], now[2])
local held = redis.call('HGET', KEYS[3], ARGV[4])
if not held or string.sub(held, 1, string.find(held, '\n', 1, true) - 1) ~= ARGV[3] then
  return {'lost', '', 0}
end
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  local fields = {}
  for i = 7, #ARGV do fields[#fields + 1] = ARGV[i] end
  redis.call('HSET', KEYS[1], 'id', ARGV[1], 'created_at', seconds, unpack(fields))
  redis.call('ZADD', KEYS[5], seconds, ARGV[1])
  state = 'QUEUED'
end
local attempt = tonumber(redis.call('HGET', KEYS[1], 'attempt') or '0')
if is_final(state) then return {'final', state, attempt} end
local tag = redis.call('HGET', KEYS[1], 'tag')
if state ~= 'QUEUED' and tag and tag ~= ARGV[4] then
  local ends = redis.call('ZSCORE', KEYS[2], tag)
  if ends and tonumber(ends) > tonumber(seconds) then return {'live', state, attempt} end
end
if not may_move(state, 'STARTING') then return {'final', state, attempt} end
attempt = math.max(attempt + 1, tonumber(ARGV[5]))
redis.call('HSET', KEYS[1], 'state', 'STARTING', 'attempt', attempt, 'worker', ARGV[2], 'owner_token', ARGV[3],
  'tag', ARGV[4], 'started_at', seconds, 'updated_at', seconds)
redis.call('HDEL', KEYS[1], 'finished_at', 'error', 'progress')
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[6], '*', 'event',
  cjson.encode({event = 'state', state = 'STARTING', attempt = attempt, worker = ARGV[2]}))
return {'begin', 'STARTING', attempt}
