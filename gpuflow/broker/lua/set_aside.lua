-- Put a leased message aside that its consumer cannot read or run. Only its owner may.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.ready
-- ARGV[1] delivery tag  ARGV[2] owner token  ARGV[3] why
-- ARGV[4] when the message had last gone back before this delivery, 0 for never (pop.lua)
--
-- Returns 1 done, 0 LOST (another owner holds the lease, or it was settled before): nothing was changed.
local held = redis.call('HGET', KEYS[3], ARGV[1])
if not held then return 0 end
local cut = string.find(held, '\n', 1, true)
if string.sub(held, 1, cut - 1) ~= ARGV[2] or has_returned(KEYS[4], ARGV[1], ARGV[4]) then return 0 end
set_aside(KEYS[4], string.sub(held, cut + 1), redis.call('HGET', KEYS[2], ARGV[1]) or '', ARGV[3])
forget_return(KEYS[4], ARGV[1])
end_lease(KEYS[1], KEYS[2], KEYS[3], ARGV[1])
return 1
