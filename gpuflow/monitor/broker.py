"""Flower's own Broker page and `api/queues/length` with the queues that there are: those of `gpuflow queues`.

Flower asks for the lengths of the queues that its workers have told it of, or that Celery's settings name. Queues of a
fleet appear with what is asked for and have lists of their own for each priority, so both handlers are given another
broker to ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from flower.api.tasks import GetQueueLengths
from flower.views.broker import BrokerView
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from tornado.web import URLSpec, url

from gpuflow.errors import BrokerUnavailable
from gpuflow.fleet.queue_rows import queue_rows
from gpuflow.handles import reachable
from gpuflow.monitor.handlers import Monitor, broker_away
from gpuflow.outages import outage


class FleetBroker:
    """Answers Flower's question for queues by the queues of the fleet."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    async def queues(self, names: object) -> list[dict[str, Any]]:
        """Return the queues of the fleet, whatever names Flower knows. Raises HTTPError 503."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._monitor.feeds.threads, self._read)
        except (BrokerUnavailable, RedisError, OperationalError) as error:
            raise broker_away(error) from None

        outage.answered()
        return found

    def _read(self) -> list[dict[str, Any]]:
        app = self._monitor.app
        with reachable():
            return live_queues(queue_rows(app.redis, app.keys, app.settings.task_topic))


def live_queues(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the queues in which something waits or runs, or that a worker serves, in the form of Flower's brokers."""
    found = [row for row in rows if row["waiting"] or row["running"] or row["workers"]]
    found.sort(key=lambda row: (not row["waiting"], row["name"].startswith("gpuflow."), row["name"]))
    return [
        {
            "name": row["name"],
            "messages": row["waiting"],
            "messages_ready": row["waiting"],
            "messages_unacknowledged": row["running"],
            "consumers": len(row["workers"]),
        }
        for row in found
    ]


class _OfFleet:
    monitor: Monitor

    def initialize(self, monitor: Monitor) -> None:
        """Take what the table of handlers gives."""
        self.monitor = monitor

    def get_broker(self) -> FleetBroker:
        """Return whom Flower's handler asks for the queues."""
        return FleetBroker(self.monitor)


class FleetBrokerView(_OfFleet, BrokerView):  # type: ignore[misc]
    """Flower's Broker page."""


class FleetQueueLengths(_OfFleet, GetQueueLengths):  # type: ignore[misc]
    """Flower's `api/queues/length`."""


_OURS: Mapping[type, type] = {BrokerView: FleetBrokerView, GetQueueLengths: FleetQueueLengths}


def with_queues_of_fleet(handlers: list[Any], monitor: Monitor) -> list[Any]:
    """Return a list of Flower's handlers, of which the two that show queues show those of the fleet."""
    return [_replaced(spec, monitor) for spec in handlers]


def _replaced(spec: Any, monitor: Monitor) -> Any:
    is_url = isinstance(spec, URLSpec)
    ours = _OURS.get(spec.handler_class if is_url else spec[1])
    if ours is None:
        return spec
    return url(spec.regex.pattern if is_url else spec[0], ours, {"monitor": monitor}, spec.name if is_url else None)


__all__ = ["FleetBroker", "live_queues", "with_queues_of_fleet"]
