"""A gateway keeps its results folder in order: by the records of a real broker, and by the clock that it is given."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from anyio import to_thread

from gpuflow.artifacts.partial import PartFile
from gpuflow.gateway.app import create_app
from gpuflow.gateway.retention import remove_old_results, remove_stale_parts
from gpuflow.settings import Settings
from tests.support.fleet import Broker
from tests.support.waiting import eventually

DAY = 86_400.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path / "broker")
    yield made
    made.client.close()
    made.server.stop()


@pytest.fixture
def settings(tmp_path: Path, broker: Broker) -> Settings:
    return Settings(redis_url=broker.url, results_dir=tmp_path / "results")


def results(root: Path, task_id: str) -> Path:
    folder = root / task_id / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "responses.json").write_text("{}")
    return root / task_id


def part(root: Path) -> Path:
    with PartFile(root / "uploads" / "x", "source") as left:
        left.append(b"half")
    return left.path


def make_old(path: Path, days: float) -> None:
    at = time.time() - days * DAY
    for one in [path, *path.rglob("*")]:
        os.utime(one, (at, at))


def test_what_the_fleet_has_forgotten_goes_when_its_time_is_over(settings: Settings, broker: Broker) -> None:
    forgotten, running = results(settings.results_dir, "forgotten"), results(settings.results_dir, "running")
    broker.client.hset("task:running", mapping={"state": "RUNNING", "attempt": 1})
    now = time.time()

    assert remove_old_results(settings, now=now + 29 * DAY) == 0
    assert forgotten.is_dir()
    assert remove_old_results(settings, now=now + 31 * DAY) == 1
    assert not forgotten.exists() and running.is_dir()


def test_without_an_answer_of_the_broker_nothing_goes(settings: Settings, broker: Broker) -> None:
    kept = results(settings.results_dir, "kept")
    later = time.time() + 300 * DAY

    assert remove_old_results(settings.model_copy(update={"redis_url": None}), now=later) == 0
    broker.server.stop()
    assert remove_old_results(settings, now=later) == 0
    assert kept.is_dir()


def test_stale_parts_go_without_a_broker(tmp_path: Path) -> None:
    settings = Settings(results_dir=tmp_path)
    left = part(tmp_path)

    assert remove_stale_parts(settings, now=time.time() + DAY / 2) == 0
    assert remove_stale_parts(settings, now=time.time() + 2 * DAY) == 1
    assert not left.exists()


async def test_a_gateway_does_so_from_its_start_on(settings: Settings) -> None:
    old, young = results(settings.results_dir, "old"), results(settings.results_dir, "young")
    make_old(old, 40)
    left = part(settings.results_dir)
    make_old(left, 2)
    app = create_app(settings)

    async with app.router.lifespan_context(app):
        gone = partial(eventually, lambda: not old.exists() and not left.exists(), what="the end of what is old")
        await to_thread.run_sync(gone)

    assert young.is_dir()
