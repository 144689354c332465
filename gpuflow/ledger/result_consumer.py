"""Waits for Celery results by their channels, and looks at the stored result again while nothing comes.

Celery subscribes to a result's channel and reads the result, over two connections. The server may take the read first:
a result that is stored and published between the two is heard by nobody. The same holds after a reconnect, where Celery
reads before it subscribes.

A result object that is collected ends its subscription, in whatever thread that happens. That is a courtesy: it neither
connects again nor waits for a broker that is away, and a consumer that was stopped has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from celery.backends.redis import ResultConsumer

#: A wait looks at the stored result after this time, then after twice that, and so on (seconds).
FIRST_LOOK_SECONDS: Final = 1.0
MAX_LOOK_SECONDS: Final = 30.0


class PatientResultConsumer(ResultConsumer):  # type: ignore[misc]
    """Celery's consumer of results, for which a message that was missed is a delay and not the end of the wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._here = threading.local()

    def stop(self) -> None:
        """Close the connection and forget what was subscribed to."""
        with self._locked():
            self.subscribed_to.clear()
            self._pending_unsubscribe.clear()
            super().stop()
            self._pubsub = None

    def _flush_pending_unsubscribe(self) -> None:
        before = getattr(self._here, "unsubscribes", False)  # a result may be collected in the middle of it
        self._here.unsubscribes = True
        try:
            super()._flush_pending_unsubscribe()
        finally:
            self._here.unsubscribes = before

    @contextmanager
    def reconnect_on_error(self) -> Iterator[None]:
        """Connect again after an error; not to end a subscription, which a lost connection has ended."""
        if not getattr(self._here, "unsubscribes", False):
            with super().reconnect_on_error():
                yield
            return
        with suppress(*self._connection_errors):
            yield

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
