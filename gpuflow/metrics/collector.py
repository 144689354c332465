"""The collector of one fleet for prometheus_client: the gateway registers it, and whoever else serves `/metrics`.

Nothing is kept in the process but the last answer, for a second or two: many scrapers cost the broker no more than one.
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
        self._read_at: float | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once. Raises redis errors."""
        with self._lock:
            now = self._clock()
            if self._read_at is None or now - self._read_at >= FRESH_SECONDS:
                self._metrics = families(read(self._client, self._keys, self._plain_queue))
                self._read_at = now
            metrics = self._metrics
        yield from metrics

    def describe(self) -> list[Metric]:
        """Return nothing: to register the collector must not ask the broker."""
        return []
