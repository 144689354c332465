-- What the steps of broker and ledger share. Stands before each of them.

-- Wake every consumer that found nothing to do; a doorbell token that nobody reads expires after `seconds`.
local function ring(waiters, seconds)
  local bells = redis.call('SMEMBERS', waiters)
  for _, bell in ipairs(bells) do
    redis.call('LPUSH', bell, '1')
    redis.call('EXPIRE', bell, seconds)
  end
  if #bells > 0 then redis.call('DEL', waiters) end
end

-- End the lease of one message.
local function end_lease(leases, unacked, owners, tag)
  redis.call('ZREM', leases, tag)
  redis.call('HDEL', unacked, tag)
  redis.call('HDEL', owners, tag)
end
