-- Give back leases whose owners do not know of them. At a connection: those whose pop was cut off from its answer; they
-- would wait for their end while the consumer takes more. When a worker begins: those of its former runs, whose processes
-- are gone.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.ready
-- ARGV[1] doorbell token seconds  ARGV[2] '1': the owners are gone, and what they took has gone back undone
-- ARGV[3] number of owner tokens that follow; then they, and the delivery tags that they know
--
-- Returns what is back at the front of its list, each as '<owner token>\n<task id>'.
local meant, known = {}, {}
local last = 3 + tonumber(ARGV[3])
for i = 4, last do meant[ARGV[i]] = true end
for i = last + 1, #ARGV do known[ARGV[i]] = true end
local owners = redis.call('HGETALL', KEYS[3])
local returned = {}
for i = 1, #owners, 2 do
  local tag, held = owners[i], owners[i + 1]
  local cut = string.find(held, '\n', 1, true)
  local owner = string.sub(held, 1, cut - 1)
  if meant[owner] and not known[tag] then
    local raw = redis.call('HGET', KEYS[2], tag)
    if raw then
      put(KEYS[4], string.sub(held, cut + 1), 'front', raw, ARGV[1])
      if ARGV[2] == '1' then note_return(KEYS[4], tag) end
      returned[#returned + 1] = owner .. '\n' .. (string.match(raw, '"id": "([^"]+)"') or '')
    end
    end_lease(KEYS[1], KEYS[2], KEYS[3], tag)
  end
end
return returned
