-- One step in the life of a machine that is launched, by the leader alone. What is about to be done stands in Redis
-- before it is done: whoever leads next finishes it, and the machine's id makes the second launch the first one.
--
-- KEYS[1] gpuflow.machines  KEYS[2] gpuflow.scaling.leader  KEYS[3] gpuflow.scaling.decisions
-- KEYS[4] worker:<id>  KEYS[5] worker:<id>:hb  KEYS[6] gpuflow.scaling  KEYS[7] gpuflow.fleet
-- ARGV[1] begin, note, end or forget  ARGV[2] machine id  ARGV[3] its record, JSON, or ''  ARGV[4] name of the leader
-- ARGV[5] its epoch  ARGV[6] decision, JSON, or ''  ARGV[7] how many decisions are kept
-- ARGV[8] id of the fleet that the leader saw  ARGV[9..] counter, amount, ... to add in gpuflow.scaling
--
-- begin: the machine is about to be launched. note: its record has changed. end: it is about to be terminated, unless its
-- worker lives; a worker that comes up after all is told to end. forget: it has been terminated.
-- Returns 'done', 'fenced' (the caller leads no more, or the broker was flushed and is that of another fleet by now), 'alive' (its worker lives), 'there' or 'gone'.
local SECONDS_OF_AN_ORDER = 86400
if not leads(KEYS[2], ARGV[4], ARGV[5]) or redis.call('GET', KEYS[7]) ~= ARGV[8] then return 'fenced' end
local there = redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1
if ARGV[1] == 'begin' and there then return 'there' end
if ARGV[1] == 'note' and not there then return 'gone' end
if ARGV[1] == 'end' then
  if redis.call('EXISTS', KEYS[5]) == 1 then return 'alive' end
  redis.call('HSET', KEYS[4], 'desired', 'retired', 'desired_by', 'autoscale', 'desired_reason', 'its machine ends',
    'wanted', 'drain', 'wanted_until', '')
  if redis.call('HEXISTS', KEYS[4], 'state') == 0 then redis.call('EXPIRE', KEYS[4], SECONDS_OF_AN_ORDER) end
end
if ARGV[1] == 'forget' then
  redis.call('HDEL', KEYS[1], ARGV[2])
else
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
end
for i = 9, #ARGV, 2 do redis.call('HINCRBYFLOAT', KEYS[6], ARGV[i], ARGV[i + 1]) end
decided(KEYS[3], ARGV[6], tonumber(ARGV[7]))
return 'done'
