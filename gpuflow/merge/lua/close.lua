-- Close: forget by what a run was joined that has ended, when all of its callers have been told. Idempotent.
--
-- KEYS[1] record of the run  KEYS[2] gpuflow.ready  KEYS[3] gpuflow.merge.results  KEYS[4] gpuflow.merge
-- KEYS[5] gpuflow.merge.sizes
-- ARGV[1] id of the run  ARGV[2] most results that are kept for further calls  ARGV[3] most bytes of them
-- then: digest of a call, bytes of its result that may be used again, or 0 for one that may not
--
-- KEYS[3] is a sorted set: digest -> when its result is forgotten; KEYS[5] a hash: digest -> its bytes, whose sum is
-- kept_bytes of KEYS[4].
--
-- Returns 1 closed, 0 callers are left.
local prefix = prefix_of(KEYS[2])
local keys = prefix .. 'merge:' .. ARGV[1] .. ':'
for i = 4, #ARGV, 2 do
  if redis.call('SCARD', keys .. 'callers:' .. ARGV[i]) > 0 then return 0 end
end
local now = tonumber(redis.call('TIME')[1])
local ttl = tonumber(redis.call('HGET', KEYS[1], 'result_ttl') or '0')
local batch = redis.call('HGET', KEYS[1], 'merge_batch')

local function kept_bytes() return tonumber(redis.call('HGET', KEYS[4], 'kept_bytes') or '0') end

local function forget(digest)
  redis.call('ZREM', KEYS[3], digest)
  redis.call('HINCRBY', KEYS[4], 'kept_bytes', -tonumber(redis.call('HGET', KEYS[5], digest) or '0'))
  redis.call('HDEL', KEYS[5], digest)
end

-- Forget results until one more has room: those that have expired, then those that will first.
local function make_room(bytes)
  for _, digest in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 100)) do forget(digest) end
  while redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[2]) or kept_bytes() + bytes > tonumber(ARGV[3]) do
    local digest = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
    if not digest then return end
    local key = prefix .. 'merge:call:' .. digest
    if redis.call('PTTL', key) > 0 then redis.call('DEL', key) end
    forget(digest)
  end
end

for i = 4, #ARGV, 2 do
  local digest, bytes = ARGV[i], tonumber(ARGV[i + 1])
  local key = prefix .. 'merge:call:' .. digest
  if redis.call('GET', key) == ARGV[1] and redis.call('PTTL', key) < 0 then
    if bytes > 0 and ttl > 0 and bytes <= tonumber(ARGV[3]) then
      forget(digest)
      make_room(bytes)
      redis.call('PEXPIRE', key, string.format('%d', math.max(1, math.ceil(ttl * 1000))))
      redis.call('ZADD', KEYS[3], now + ttl, digest)
      redis.call('HSET', KEYS[5], digest, bytes)
      redis.call('HINCRBY', KEYS[4], 'kept_bytes', bytes)
    else
      redis.call('DEL', key)
    end
  end
end
if batch and redis.call('GET', prefix .. 'merge:batch:' .. batch) == ARGV[1] then
  redis.call('DEL', prefix .. 'merge:batch:' .. batch)
end
redis.call('DEL', keys .. 'calls')
return 1
