-- Begin a new round of a failed or cancelled pipeline: what has not succeeded is pending again, under a new epoch.
--
-- KEYS[1] pipeline record  KEYS[2] stages hash  KEYS[3] events of the pipeline  KEYS[4] gpuflow.audit
-- ARGV[1] cap of the event stream  ARGV[2] epoch that the caller has seen
-- ARGV[3] who acts  ARGV[4] id of the pipeline  ARGV[5] a new signature of what the caller has seen, or ''
--
-- Returns {verdict, epoch}: 'resumed' (now, or since the caller looked), 'running' (it has not ended), 'succeeded' (nothing is left), 'unknown'.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'unknown', 0} end
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch'))
if epoch > tonumber(ARGV[2]) then return {'resumed', epoch} end
if state == 'RUNNING' then return {'running', epoch} end
if state == 'SUCCEEDED' then return {'succeeded', epoch} end
epoch = epoch + 1
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'RUNNING', 'epoch', epoch, 'resumed_at', string.format('%d.%06d', now[1], now[2]))
redis.call('HDEL', KEYS[1], 'finished_at', 'error')
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'signature', ARGV[5]) end
for i = 1, 3 do redis.call('PERSIST', KEYS[i]) end
local stages = redis.call('HGETALL', KEYS[2])
for i = 1, #stages, 2 do
  if cjson.decode(stages[i + 1])['state'] ~= 'SUCCEEDED' then redis.call('HDEL', KEYS[2], stages[i]) end
end
each_task(KEYS[2], KEYS[3], function(_, key) redis.call('PERSIST', key) end)
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[1], '*', 'event', cjson.encode({event = 'state', state = 'RUNNING', epoch = epoch}))
audit(KEYS[4], 'pipeline.resume', ARGV[3], 'pipeline:' .. ARGV[4], 'from', state, 'epoch', epoch)
return {'resumed', epoch}
