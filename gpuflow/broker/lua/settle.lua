-- End the lease of one message: acknowledge it, or put it back. Only its owner may.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.ready
-- KEYS[5] gpuflow.delayed  KEYS[6] gpuflow.parked
-- ARGV[1] delivery tag  ARGV[2] owner token  ARGV[3] 'ack', 'front' or 'back'  ARGV[4] doorbell token seconds
-- ARGV[5] seconds to wait before a message that is put back can be taken again (0: none)
-- ARGV[6] when the message had last gone back before this delivery, 0 for never (pop.lua)
-- ARGV[7], ARGV[8] id of the signature of the message, and for how many seconds it is valid yet: it is used then, and no
-- message with it is run again; without them, nothing is signed
--
-- Returns 1 done, 0 LOST (another owner holds the lease, or it was settled before): nothing was changed.
local list = list_of_lease(KEYS[3], KEYS[4], ARGV[1], ARGV[2], ARGV[6])
if not list then return 0 end
local raw = ARGV[3] ~= 'ack' and redis.call('HGET', KEYS[2], ARGV[1])
local pause = tonumber(ARGV[5])
if raw and pause > 0 then
  delay(KEYS[4], KEYS[5], KEYS[6], ARGV[1], ARGV[3], list, raw, pause, ARGV[4])
elseif raw then
  put(KEYS[4], list, ARGV[3], raw, ARGV[4])
end
if raw then
  note_return(KEYS[4], ARGV[1])
else
  forget_return(KEYS[4], ARGV[1])
end
if ARGV[3] == 'ack' then use_signature(KEYS[4], ARGV[7], ARGV[8]) end
end_lease(KEYS[1], KEYS[2], KEYS[3], ARGV[1])
return 1
