-- What the server has counted of the audit log.
--
-- KEYS[1] gpuflow.audit  KEYS[2] gpuflow.audit.chain
--
-- Returns {entries that are there, entries that were ever appended or -1 where the server does not count them, id of the
-- last one that was appended, id of the last one that is there, id of the first link}, each id '' where there is none.
local function id_of(entries) return entries[1] and entries[1][1] or '' end
local link = id_of(redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1))
if redis.call('EXISTS', KEYS[1]) == 0 then return {0, 0, '', '', link} end
local info, found = redis.call('XINFO', 'STREAM', KEYS[1]), {}
for i = 1, #info, 2 do found[info[i]] = info[i + 1] end
return {found['length'], found['entries-added'] or -1, found['last-generated-id'],
  id_of(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)), link}
