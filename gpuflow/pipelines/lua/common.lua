-- What the steps of pipelines share. Stands before each of them.

-- Call `act(record, key)` for each key of each task that the stages of a pipeline name now: its record, its events and
-- how its attempts went. `stages` is the hash of the stages, `events` the stream of the pipeline, whose front is that
-- of every key.
local function each_task(stages, events, act)
  local prefix = string.match(events, '^(.*)events:[^:]*$')
  for _, stored in ipairs(redis.call('HVALS', stages)) do
    for _, id in ipairs(cjson.decode(stored)['tasks'] or {}) do
      local record = prefix .. 'task:' .. id
      for _, key in ipairs({record, record .. ':attempts', prefix .. 'events:' .. id}) do act(record, key) end
    end
  end
end
