-- Append one entry to the audit log.
--
-- KEYS[1] gpuflow.audit  KEYS[2] gpuflow.audit.sent:<call>
-- ARGV[1] seconds that a repeat of this call, whose first answer was lost, is recognised
-- ARGV[2..] field, value, ...: action, actor and target first
--
-- Returns 1 appended, 0 by this very call before.
if not redis.call('SET', KEYS[2], '1', 'NX', 'EX', ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], '*', unpack(ARGV, 2))
return 1
