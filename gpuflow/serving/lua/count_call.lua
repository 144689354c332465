-- Count a call of a model that has ended, and how long its first text took, in `gpuflow.metrics`.
--
-- KEYS[1] gpuflow.ready, from which the other key is derived
-- ARGV[1] model  ARGV[2] outcome  ARGV[3] seconds to the first text, '' where there was none
--
-- metrics/counters.py has the same bounds.
local FIRST_TOKEN_BOUNDS = {0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60}

local prefix = prefix_of(KEYS[1])
count(prefix, 1, 'calls', ARGV[2], ARGV[1])
if ARGV[3] ~= '' then observe(prefix, 'first', ARGV[1], tonumber(ARGV[3]), FIRST_TOKEN_BOUNDS) end
