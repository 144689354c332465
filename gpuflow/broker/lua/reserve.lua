-- Claim a waiting message for a machine that is to be kept free for it, or renew that.
--
-- KEYS[1] prefix of the claims: gpuflow.reserved:  KEYS[2..] lists of one queue, most urgent first
-- ARGV[1] worker that claims  ARGV[2] seconds until the claim ends
--
-- Returns {delivery tag, task id} of the first message that no other worker has claimed; nil for none.
local DEPTH = 20
for i = 2, #KEYS do
  for depth = 1, DEPTH do
    local raw = redis.call('LINDEX', KEYS[i], -depth)
    if not raw then break end
    local ok, message = pcall(cjson.decode, raw)
    local tag = ok and type(message) == 'table' and type(message['properties']) == 'table'
      and message['properties']['delivery_tag']
    if type(tag) == 'string' then
      local holder = redis.call('GET', KEYS[1] .. tag)
      if not holder or holder == ARGV[1] then
        redis.call('SET', KEYS[1] .. tag, ARGV[1], 'PX', math.floor(ARGV[2] * 1000))
        return {tag, type(message['headers']) == 'table' and message['headers']['id'] or tag}
      end
    end
  end
end
return false
