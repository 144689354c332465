-- Take the delayed messages of a queue away, as `celery purge` does with those that wait in it.
--
-- KEYS[1] gpuflow.delayed  KEYS[2] gpuflow.parked  KEYS[3] gpuflow.ready  KEYS[4..] lists of the queue
--
-- Returns how many there were. The queue leaves the ready index if nothing waits in it.
local lists = {}
for i = 4, #KEYS do lists[KEYS[i]] = true end
local parked = redis.call('HGETALL', KEYS[2])
local count = 0
for i = 1, #parked, 2 do
  local tag, text = parked[i], parked[i + 1]
  local side = string.find(text, '\n', 1, true)
  if lists[string.sub(text, side + 1, string.find(text, '\n', side + 1, true) - 1)] then
    redis.call('ZREM', KEYS[1], tag)
    redis.call('HDEL', KEYS[2], tag)
    forget_return(KEYS[3], tag)
    count = count + 1
  end
end
refresh(KEYS[3], queue_of(KEYS[3], KEYS[4]))
return count
