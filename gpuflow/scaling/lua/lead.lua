-- Lead, or go on to lead: one of several beats does, for a term at a time, on the server's clock.
--
-- KEYS[1] gpuflow.scaling.leader
-- ARGV[1] name of the beat  ARGV[2] term in seconds
--
-- Each time that somebody begins to lead, or its own term had ended before it came again, the epoch is one higher: every
-- step of a leader names its epoch, so that one which was paused changes nothing.
-- Returns the epoch, 0 while another one leads.
local owner, epoch, until_ = unpack(redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'until'))
local now = redis.call('TIME')
local seconds = now[1] + now[2] / 1000000
local live = tonumber(until_ or '0') > seconds
if live and owner ~= ARGV[1] then return 0 end
epoch = tonumber(epoch or '0')
if not live or owner ~= ARGV[1] then epoch = epoch + 1 end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'epoch', epoch, 'until', string.format('%.6f', seconds + ARGV[2]))
return epoch
