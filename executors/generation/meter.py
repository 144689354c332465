"""How fast an answer comes. Imports no torch."""

from __future__ import annotations

import time


class Meter:
    """Counts tokens over time. `due` is true at most once an interval, so that progress costs little."""

    def __init__(self, interval_seconds: float = 0.5) -> None:
        self._started = self._last = time.monotonic()
        self._interval_seconds = interval_seconds
        self.tokens = 0

    def due(self) -> bool:
        """Whether it is time to tell again."""
        now = time.monotonic()
        if now - self._last < self._interval_seconds:
            return False
        self._last = now
        return True

    def tokens_per_second(self, running: int = 0) -> float:
        """Return the mean speed since the start; `running` are the tokens of rows not yet counted."""
        elapsed = time.monotonic() - self._started
        return round((self.tokens + running) / elapsed, 2) if elapsed > 0 else 0.0
