-- What the steps that write to the audit log share. Stands before each of them.
--
-- An entry of the stream gpuflow.audit: `action`, `actor`, `target`, then details. A text that is too long is cut.
-- A stream that takes no more entries, as somebody has written the last id there can be, stops no step: beat, which seals
-- the log, finds that.
local MOST_AUDIT_BYTES = 255
local function audit(stream, action, actor, target, ...)
  local fields = {'action', action, 'actor', actor, 'target', target, ...}
  for i = 1, #fields do fields[i] = string.sub(tostring(fields[i]), 1, MOST_AUDIT_BYTES) end
  redis.pcall('XADD', stream, '*', unpack(fields))
end
