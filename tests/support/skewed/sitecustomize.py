"""A Python whose wall clock is ahead of the machine's by CLOCK_AHEAD_SECONDS, for a worker of a test."""

import os
import time

_ahead, _time = float(os.environ.get("CLOCK_AHEAD_SECONDS", "0")), time.time
time.time = lambda: _time() + _ahead
