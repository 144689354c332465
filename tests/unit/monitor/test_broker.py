"""Queues of the fleet as Flower's Broker page has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tornado.web import HTTPError

from gpuflow.monitor import broker
from gpuflow.monitor.feeds import Feeds


def row(name: str, *, waiting: int = 0, running: int = 0, workers: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"name": name, "requirement": None, "waiting": waiting, "running": running, "workers": list(workers)}


def test_queues_are_those_where_something_is_going_on() -> None:
    rows = [
        row("cpu"),
        row("gpuflow.control", workers=("w1", "w2")),
        row("tasks", workers=("w1",)),
        row("gpu-h100", running=2),
        row("gpu-a100", waiting=3, running=1),
    ]
    found = broker.live_queues(rows)
    assert [one["name"] for one in found] == ["gpu-a100", "gpu-h100", "tasks", "gpuflow.control"]
    assert found[0] == {
        "name": "gpu-a100",
        "messages": 3,
        "messages_ready": 3,
        "messages_unacknowledged": 1,
        "consumers": 0,
    }
    assert [one["consumers"] for one in found] == [0, 0, 1, 2]


async def test_a_broker_that_is_away_is_no_broker_without_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> None:
        raise RedisConnectionError("away")

    monkeypatch.setattr(broker, "queue_rows", away)
    settings = SimpleNamespace(task_topic="tasks")
    monitor: Any = SimpleNamespace(app=SimpleNamespace(redis=None, keys=None, settings=settings), feeds=Feeds())
    with pytest.raises(HTTPError) as told:
        await broker.FleetBroker(monitor).queues([])
    assert told.value.status_code == 503
