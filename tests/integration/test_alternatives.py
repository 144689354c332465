"""Ordered alternatives of `accelerators`: the first that is served is preferred, and none is waited for without end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuflow.client import Task, submit
from gpuflow.settings import Settings
from tests.fixtures.simulated_nvml import simulated_machine
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

ONE_OF = ["H100:1", "T4:1"]


def machine(folder: Path, name: str) -> dict[str, str]:
    """Return the environment of a simulated machine of its own."""
    place = folder / name
    place.mkdir()
    return {**simulated_machine(place, name), "GPUFLOW_LOCK_DIR": str(place / "locks")}


def ask(fleet: TestFleet, accelerators: Any, **echo: Any) -> dict[str, Any]:
    return {**fleet.echo(**echo), "resources": {"accelerators": accelerators}}


def events_of(fleet: TestFleet, task: Task) -> list[str]:
    return [event.data["queue"] for event in fleet.app.event_log.read(task.id) if "queue" in event.data]


def wait_for_alternatives(fleet: TestFleet, seconds: float) -> None:
    """Let clients of the fleet wait so long for one alternative."""
    fleet.settings = fleet.app.settings = Settings.model_validate(
        {**fleet.settings.model_dump(), "fallback_seconds": seconds}
    )


def test_the_first_that_is_served_is_asked_for(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("t4", env=machine(tmp_path, "1xT4"))

    task = submit(ask(fleet, ONE_OF), app=fleet.app)

    assert task.wait(timeout=patient(30)).worker == "t4"
    assert events_of(fleet, task) == ["gpu-t4"]


def test_a_task_whose_first_choice_is_busy_moves_on_and_keeps_its_place(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("h100", env=machine(tmp_path, "1xH100"))
    fleet.start_worker("t4", env=machine(tmp_path, "1xT4"))
    wait_for_alternatives(fleet, 600)
    busy = submit(ask(fleet, "H100:1", sleep_seconds=600), app=fleet.app)
    eventually(lambda: busy.state == "RUNNING")
    also_busy = submit(ask(fleet, "T4:1", sleep_seconds=600), app=fleet.app)
    eventually(lambda: also_busy.state == "RUNNING")

    moved = submit({**ask(fleet, ONE_OF), "priority": 7}, app=fleet.app)
    behind = submit(ask(fleet, "T4:1"), app=fleet.app)
    fleet.broker.client.zadd(fleet.app.keys.fallbacks, {moved.id: 1}, xx=True)  # its time is over now
    eventually(lambda: moved.record().queue == "gpu-t4", what="the move")
    assert also_busy.cancel()

    record = moved.wait(timeout=patient(30))
    assert (record.state, record.worker, record.attempt) == ("SUCCEEDED", "t4", 1)
    assert events_of(fleet, moved)[:2] == ["gpu-h100", "gpu-t4"]
    assert record.started_at < behind.wait(timeout=patient(30)).started_at  # type: ignore[operator]
    assert busy.cancel()


def test_a_task_that_nobody_serves_goes_round_until_a_worker_comes(fleet: TestFleet, tmp_path: Path) -> None:
    wait_for_alternatives(fleet, 1)
    fleet.start_worker("cpu")
    task = submit(ask(fleet, [*ONE_OF, "A100:1"]), app=fleet.app)
    eventually(lambda: len(events_of(fleet, task)) >= 4, what="a full round")

    assert events_of(fleet, task)[:4] == ["gpu-h100", "gpu-t4", "gpu-a100", "gpu-h100"]
    fleet.start_worker("t4", env=machine(tmp_path, "1xT4"))
    assert task.wait(timeout=patient(30)).worker == "t4"
    eventually(lambda: not fleet.broker.client.zcard(fleet.app.keys.fallbacks), what="nothing left to move")


def test_a_cancelled_task_moves_nowhere(fleet: TestFleet) -> None:
    wait_for_alternatives(fleet, 1)
    task = submit(ask(fleet, ONE_OF), app=fleet.app)
    fleet.start_worker("cpu")
    eventually(lambda: task.record().queue == "gpu-t4", what="a move")

    assert task.cancel() == "cancelled"

    client, keys = fleet.broker.client, fleet.app.keys
    eventually(lambda: not client.zcard(keys.fallbacks))
    assert [client.llen(queue) for queue in ("gpu-h100", "gpu-t4")] == [0, 0]
    assert client.zcard(keys.ready) == 0
