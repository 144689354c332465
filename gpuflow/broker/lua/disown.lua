-- Give back leases whose owner does not know of them. At a connection: those whose pop was cut off from its answer; they
-- would wait for their end while the consumer takes more. When a worker begins: those of its former runs, whose process
-- is gone.
--
-- KEYS[1] gpuflow.leases  KEYS[2] gpuflow.unacked  KEYS[3] gpuflow.owners  KEYS[4] gpuflow.ready
-- ARGV[1] owner token (`<worker>:<random>`)  ARGV[2] doorbell token seconds
-- ARGV[3] worker of whose former runs the leases are given back, and no others; '' for the owner's own ones
-- ARGV[4..] delivery tags that the owner knows
--
-- Returns what is back at the front of its list, each as '<owner token>\n<task id>'.
local known = {}
for i = 4, #ARGV do known[ARGV[i]] = true end

local function is_meant(owner, tag)
  if ARGV[3] == '' then return owner == ARGV[1] and not known[tag] end
  return owner ~= ARGV[1] and string.match(owner, '^(.*):') == ARGV[3]
end

local owners = redis.call('HGETALL', KEYS[3])
local returned = {}
for i = 1, #owners, 2 do
  local tag, held = owners[i], owners[i + 1]
  local cut = string.find(held, '\n', 1, true)
  local owner = string.sub(held, 1, cut - 1)
  if is_meant(owner, tag) then
    local raw = redis.call('HGET', KEYS[2], tag)
    if raw then
      put(KEYS[4], string.sub(held, cut + 1), 'front', raw, ARGV[2])
      if owner ~= ARGV[1] then note_return(KEYS[4], tag) end
      returned[#returned + 1] = owner .. '\n' .. (string.match(raw, '"id": "([^"]+)"') or '')
    end
    end_lease(KEYS[1], KEYS[2], KEYS[3], tag)
  end
end
return returned
