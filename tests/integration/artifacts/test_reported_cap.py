"""A worker tells the cap on its transfers: in the registry, and to `celery inspect stats`."""

from __future__ import annotations

from gpuflow.fleet.registry import Fleet
from tests.support.fleet import TestFleet
from tests.support.waiting import patient


def test_a_worker_tells_its_cap(fleet: TestFleet) -> None:
    fleet.start_worker("capped", env={"WORKER_NETWORK_BANDWIDTH_BYTES_PER_SEC": "125000000"})
    fleet.start_worker("free")
    registry = Fleet(fleet.app.redis, fleet.app.keys)

    told = {name: registry.find(name) for name in ("capped", "free")}
    stats = fleet.app.control.inspect(timeout=patient(60), limit=2).stats()

    caps = {name: entry.public()["bandwidthBytesPerSecond"] for name, entry in told.items() if entry}
    assert caps == {"capped": 125_000_000, "free": None}
    assert fleet.app.redis.hget(fleet.app.keys.worker("capped"), "bandwidth_bytes_per_second") == "125000000"
    said = {worker["gpuflow"]["worker"]: worker["gpuflow"]["bandwidthBytesPerSecond"] for worker in stats.values()}
    assert said == caps
