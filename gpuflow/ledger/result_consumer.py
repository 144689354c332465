"""Waits for Celery results by their channels, and looks at the stored result again while nothing comes.

Celery subscribes to a result's channel and reads the result, over two connections. The server may take the read first:
a result that is stored and published between the two is heard by nobody. The same holds after a reconnect, where Celery
reads before it subscribes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from celery.backends.redis import ResultConsumer

#: A wait looks at the stored result after this time, then after twice that, and so on (seconds).
FIRST_LOOK_SECONDS: Final = 1.0
MAX_LOOK_SECONDS: Final = 30.0


class PatientResultConsumer(ResultConsumer):  # type: ignore[misc]
    """Celery's consumer of results, for which a message that was missed is a delay and not the end of the wait."""

    def _wait_for_pending(
        self, result: Any, timeout: float | None = None, on_interval: Callable[[], Any] | None = None, **options: Any
    ) -> Iterator[None]:
        pause = FIRST_LOOK_SECONDS
        due = time.monotonic() + pause

        def look() -> None:
            nonlocal pause, due
            if on_interval is not None:
                on_interval()
            if time.monotonic() >= due:
                self.on_wait_for_pending(result)
                pause = min(2 * pause, MAX_LOOK_SECONDS)
                due = time.monotonic() + pause

        yield from super()._wait_for_pending(result, timeout=timeout, on_interval=look, **options)


__all__ = ["PatientResultConsumer"]
