"""Bounds what the events of one attempt may weigh: each by its size, all by bytes and by count a second.

Used by the attempt. What is over the bounds is left out of the event stream; the log file of the child has its lines,
and the result is no event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

#: Largest event that is kept, in bytes of JSON.
MAX_EVENT_BYTES: Final = 1 << 20
#: Largest progress that is kept in the task's record, in bytes of JSON.
MAX_PROGRESS_BYTES: Final = 64 << 10
#: What one attempt may send for long, a second, and what it may send at once after a pause.
BYTES_PER_SECOND: Final = 2 << 20
BURST_BYTES: Final = 8 << 20
EVENTS_PER_SECOND: Final = 5_000
BURST_EVENTS: Final = 20_000
#: Paths of artifacts that an attempt may declare.
MAX_ARTIFACTS: Final = 10_000


class EventBudget:
    """Says of each event whether it is kept. For one thread.

    `dropped` and `dropped_bytes` count what is not.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._bytes, self._events = float(BURST_BYTES), float(BURST_EVENTS)
        self.dropped = self.dropped_bytes = 0

    def takes(self, size: int) -> bool:
        """Whether an event of `size` bytes is kept; counts it."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._bytes = min(BURST_BYTES, self._bytes + passed * BYTES_PER_SECOND)
        self._events = min(BURST_EVENTS, self._events + passed * EVENTS_PER_SECOND)
        if size > MAX_EVENT_BYTES or size > self._bytes or self._events < 1:
            self.dropped += 1
            self.dropped_bytes += size
            return False
        self._bytes -= size
        self._events -= 1
        return True
