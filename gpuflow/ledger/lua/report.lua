-- Append events of a running attempt and learn what is asked of it.
--
-- KEYS[1] task record  KEYS[2] events  KEYS[3] Celery's result of the task
-- ARGV[1] attempt  ARGV[2] owner token  ARGV[3] progress JSON or ''  ARGV[4] cap of the event stream
-- ARGV[5] what Celery is to show (STARTED, PROGRESS) or ''  ARGV[6] seconds until that expires
-- ARGV[7] id of this call: a repeat, whose first answer was lost, writes nothing again
-- ARGV[8] cap of the event stream in bytes  ARGV[9..] event JSON
--
-- Returns 'ok', 'cancel' (stop the child), 'superseded' (another attempt is current, or the record is final: nothing
-- was written), or 'behind' (nothing was written: the server came back from a snapshot that is older than this attempt;
-- whether it may go on is decided with its lease, see reclaim.lua).

-- Remove the oldest events until the rest has at most `most` bytes, though never the newest one; return the bytes left.
local function trim_by_bytes(stream, most)
  local kept, last, from = 0, nil, '+'
  while true do
    local page = redis.call('XREVRANGE', stream, from, '-', 'COUNT', 20)
    if #page == 0 then return kept end
    for _, entry in ipairs(page) do
      local size = 0
      for _, text in ipairs(entry[2]) do size = size + #text end
      if last and kept + size > most then
        redis.call('XTRIM', stream, 'MINID', last)
        return kept
      end
      kept, last = kept + size, entry[1]
    end
    from = '(' .. last
  end
end

local state, attempt, token, call, cancel = unpack(redis.call('HMGET', KEYS[1],
  'state', 'attempt', 'owner_token', 'report_call', 'cancel_requested'))
if not state or (not is_final(state) and tonumber(attempt or '0') < tonumber(ARGV[1])) then return 'behind' end
if attempt ~= ARGV[1] or token ~= ARGV[2] or not runs(state) then return 'superseded' end
local answer = cancel and 'cancel' or 'ok'
if call == ARGV[7] then return answer end
if state == 'STARTING' then
  redis.call('HSET', KEYS[1], 'state', 'RUNNING')
  tell(KEYS[2], ARGV[4], {event = 'state', state = 'RUNNING', attempt = tonumber(attempt)})
end
redis.call('HSET', KEYS[1], 'updated_at', clock(), 'report_call', ARGV[7])
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'progress', ARGV[3]) end
local bytes = 0
for i = 9, #ARGV do
  bytes = bytes + #ARGV[i]
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'event', ARGV[i])
end
-- What was added since the stream was last weighed; what the count has trimmed is still in it, so it is an upper bound.
if bytes > 0 and redis.call('HINCRBY', KEYS[1], 'event_bytes', bytes) > tonumber(ARGV[8]) then
  redis.call('HSET', KEYS[1], 'event_bytes', trim_by_bytes(KEYS[2], tonumber(ARGV[8]) / 2))
end
if ARGV[5] ~= '' then
  redis.call('SETEX', KEYS[3], ARGV[6], ARGV[5])
  redis.call('PUBLISH', KEYS[3], ARGV[5])
end
return answer
