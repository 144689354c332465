"""The collector of one fleet for prometheus_client: the gateway registers it, and whoever else serves `/metrics`.

Nothing is kept in the process but the last answer, or error, for a second or two: many scrapers cost the broker no more
than one, and of those that come at once only the first waits for a broker that does not answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import redis
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpuflow.broker.keys import Keys
from gpuflow.metrics.families import families
from gpuflow.metrics.reading import read

#: An answer is given again for so long, in seconds.
FRESH_SECONDS: Final = 2.0


class FleetCollector(Collector):
    """Metrics of one fleet. `client` must decode responses, `plain_queue` is that of plain Celery tasks."""

    def __init__(
        self, client: redis.Redis, keys: Keys, plain_queue: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._keys = keys
        self._plain_queue = plain_queue
        self._clock = clock
        self._lock = threading.Lock()
        self._metrics: list[Metric] = []
        self._error: Exception | None = None
        self._read_at: float | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once. Raises redis errors, and again what the last look has raised."""
        with self._lock:
            if self._read_at is None or self._clock() - self._read_at >= FRESH_SECONDS:
                self._read()
            metrics, error = self._metrics, self._error
        if error is not None:
            raise error.with_traceback(None)
        yield from metrics

    def _read(self) -> None:
        try:
            self._metrics, self._error = families(read(self._client, self._keys, self._plain_queue)), None
        except Exception as error:  # noqa: BLE001  (whatever it is, no older answer is given for it)
            self._error = error
        finally:
            self._read_at = self._clock()

    def describe(self) -> list[Metric]:
        """Return nothing: to register the collector must not ask the broker."""
        return []
