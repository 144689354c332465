-- What the autoscaler has written ends with it. Stands before the steps that read or drop what a worker is to be.
local function drop_desired(worker)
  redis.call('HDEL', worker, 'desired', 'desired_by', 'desired_reason', 'desired_at')
end

-- Drop that a worker is disabled, where the autoscaler wrote it and nobody has led for so many seconds.
local function drop_if_forsaken(worker, leader, seconds)
  local desired, by = unpack(redis.call('HMGET', worker, 'desired', 'desired_by'))
  if desired ~= 'disabled' or by ~= 'autoscale' then return false end
  local now = redis.call('TIME')
  local until_ = tonumber(redis.call('HGET', leader, 'until') or '0')
  if until_ + seconds > now[1] + now[2] / 1000000 then return false end
  drop_desired(worker)
  local prefix, id = string.match(worker, '^(.*)worker:([^:]*)$')
  audit(prefix .. 'gpuflow.audit', 'worker.enable', 'autoscaler', 'worker:' .. id, 'reason', 'nothing scales any more')
  return true
end
