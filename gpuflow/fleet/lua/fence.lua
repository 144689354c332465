-- Whether a beat leads still: by its name, the epoch in which it began to lead, and the server's clock. Stands before
-- each step that a leader takes: a beat that was paused and comes back finds another epoch, or its own lease ended.
local function leads(leader, owner, epoch)
  local its_owner, its_epoch, until_ = unpack(redis.call('HMGET', leader, 'owner', 'epoch', 'until'))
  local now = redis.call('TIME')
  return its_owner == owner and its_epoch == epoch and tonumber(until_) > now[1] + now[2] / 1000000
end

-- Keep a decision, JSON, with the server's time; the newest are kept.
local function decided(decisions, text, cap)
  if text == '' then return end
  local now = redis.call('TIME')
  redis.call('LPUSH', decisions, string.format('{"at": %d.%06d, ', now[1], now[2]) .. string.sub(text, 2))
  redis.call('LTRIM', decisions, 0, cap - 1)
end
