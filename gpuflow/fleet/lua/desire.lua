-- Write what a worker is to be. Its worker follows at once when it is notified, and at each heartbeat.
--
-- KEYS[1] worker:<id>  KEYS[2] worker:<id>:hb  KEYS[3] gpuflow.scaling.leader  KEYS[4] gpuflow.scaling.decisions
-- KEYS[5] gpuflow.audit
-- ARGV[1] enabled, disabled, draining or retired  ARGV[2] by whom: manual, or autoscale  ARGV[3] why
-- ARGV[4] seconds until a drain is to be done, or ''  ARGV[5] name of the leader  ARGV[6] its epoch
-- ARGV[7] decision, JSON, or ''  ARGV[8] how many decisions are kept
-- ARGV[9] worker id  ARGV[10] who acts  ARGV[11] what the audit log calls it  ARGV[12] id of this call
--
-- What an operator wrote is left alone by the autoscaler. A worker that drains ends: nothing takes that back.
-- Returns 'written', 'same', 'manual', 'draining', 'fenced' (the caller leads no more) or 'gone' (no such worker lives).
if ARGV[2] == 'autoscale' and not leads(KEYS[3], ARGV[5], ARGV[6]) then return 'fenced' end
if redis.call('EXISTS', KEYS[2]) == 0 or redis.call('HEXISTS', KEYS[1], 'state') == 0 then return 'gone' end
local desired, by, call = unpack(redis.call('HMGET', KEYS[1], 'desired', 'desired_by', 'desired_call'))
if call == ARGV[12] then return 'written' end  -- the answer of this very call was lost
if ARGV[2] == 'autoscale' and by == 'manual' then return 'manual' end
local ends = ARGV[1] == 'draining' or ARGV[1] == 'retired'
if (desired == 'draining' or desired == 'retired') and not ends then return 'draining' end
if desired == ARGV[1] and by == ARGV[2] and ARGV[4] == '' then return 'same' end
local now = redis.call('TIME')
local seconds = now[1] + now[2] / 1000000
redis.call('HSET', KEYS[1], 'desired', ARGV[1], 'desired_by', ARGV[2], 'desired_reason', ARGV[3],
  'desired_at', string.format('%.6f', seconds), 'desired_call', ARGV[12])
if ends then
  local until_ = ARGV[4] == '' and '' or string.format('%.6f', seconds + tonumber(ARGV[4]))
  redis.call('HSET', KEYS[1], 'wanted', 'drain', 'wanted_until', until_)
end
audit(KEYS[5], ARGV[11], ARGV[10], 'worker:' .. ARGV[9], 'reason', ARGV[3])
decided(KEYS[4], ARGV[7], tonumber(ARGV[8]))
return 'written'
