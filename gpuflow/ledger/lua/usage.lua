-- What usage is summed from, of a page of tasks, in one answer: a command of its own for each would cost the one who asks
-- more than the sums do.
--
-- KEYS[1..n] task records  KEYS[n+1..2n] attempts of the same tasks
-- ARGV fields of the records; the first is `run`
--
-- Returns for each task that has attempts, or is merged into a run: {its place among the keys, the fields, the entries of
-- its attempts}. Writes nothing.
local found, count = {}, #KEYS / 2
for place = 1, count do
  local fields = redis.call('HMGET', KEYS[place], unpack(ARGV))
  local attempts = redis.call('HVALS', KEYS[count + place])
  if #attempts > 0 or fields[1] then found[#found + 1] = {place, fields, attempts} end
end
return found
