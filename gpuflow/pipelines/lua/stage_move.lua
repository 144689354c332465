-- Move one stage, if it is still where the caller saw it. Compare-and-set.
--
-- KEYS[1] stages hash  KEYS[2] pipeline record  KEYS[3] events of the pipeline
-- ARGV[1] stage name  ARGV[2] expected state  ARGV[3] expected epoch  ARGV[4] new record JSON
-- ARGV[5] cap of the event stream
--
-- Returns 1 moved, now or by this very call before; 0 not: somebody else moved it, or the pipeline has ended.
if redis.call('HGET', KEYS[2], 'state') ~= 'RUNNING' then return 0 end
local stored = redis.call('HGET', KEYS[1], ARGV[1])
local state, epoch = 'PENDING', redis.call('HGET', KEYS[2], 'epoch')
if stored == ARGV[4] then return 1 end
if stored then
  local record = cjson.decode(stored)
  state, epoch = record['state'], tostring(record['epoch'])
end
if state ~= ARGV[2] or epoch ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[4])
local moved = cjson.decode(ARGV[4])
local event = {event = 'stage', stage = ARGV[1], state = moved['state'], tasks = moved['tasks']}
if type(moved['error']) == 'table' then event['error'] = moved['error'] end
if type(moved['reason']) == 'string' then event['reason'] = moved['reason'] end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'event', cjson.encode(event))
return 1
