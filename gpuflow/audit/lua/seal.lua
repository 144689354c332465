-- Append one link to the chain of the audit log, if the chain still ends where the caller saw it. Compare-and-append.
--
-- KEYS[1] gpuflow.audit.chain  KEYS[2] gpuflow.audit
-- ARGV[1] digest of the link that the caller saw last, '' for none  ARGV[2] digest of the new one
-- ARGV[3] its record, JSON  ARGV[4] the oldest entry of the log that is kept, or ''  ARGV[5] the oldest link, or ''
--
-- A link that says that entries were trimmed trims them in the same step (ARGV[4], ARGV[5]).
--
-- Returns 1 appended, now or by this very call before; 0: somebody else has appended.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local digest = ''
if last then
  for i = 1, #last[2], 2 do
    if last[2][i] == 'digest' then digest = last[2][i + 1] end
  end
end
if digest == ARGV[2] then return 1 end
if digest ~= ARGV[1] then return 0 end
redis.call('XADD', KEYS[1], '*', 'digest', ARGV[2], 'record', ARGV[3])
if ARGV[4] ~= '' then
  redis.call('XTRIM', KEYS[2], 'MINID', ARGV[4])
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[5])
end
return 1
