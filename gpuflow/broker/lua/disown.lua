-- Give back the leases that a consumer has and does not know of: the line was cut between the pop and its answer.
-- Without this step they would wait for their end, while the consumer takes more.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.ready
-- ARGV[1] owner token  ARGV[2] doorbell token seconds  ARGV[3..] delivery tags that it knows
--
-- Returns the number of messages that are back at the front of their lists.
local known = {}
for i = 3, #ARGV do known[ARGV[i]] = true end
local owners = redis.call('HGETALL', KEYS[3])
local returned = 0
for i = 1, #owners, 2 do
  local tag, held = owners[i], owners[i + 1]
  local cut = string.find(held, '\n', 1, true)
  if not known[tag] and string.sub(held, 1, cut - 1) == ARGV[1] then
    local raw = redis.call('HGET', KEYS[2], tag)
    if raw then
      put(KEYS[4], string.sub(held, cut + 1), 'front', raw, ARGV[2])
      returned = returned + 1
    end
    end_lease(KEYS[1], KEYS[2], KEYS[3], tag)
  end
end
return returned
