"""A task goes on from its last checkpoint on a machine that shares no disk with the one before."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.artifacts.store import RESERVED_PREFIX
from gpuflow.client import Task, submit
from gpuflow.protocol import CHECKPOINT_MARKER
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import eventually, patient

STEPS = 40
#: What the steps take together: long beside the first checkpoints, whatever the machine does meanwhile.
SECONDS = 6
LEASE = {"GPUFLOW_LEASE_SEC": "3"}


class Shore:
    """Where results go: its folder, the destination that a task names, and what a worker needs for it."""

    def __init__(self, root: Path, destination: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self.root, self.destination, self.env = root, destination, env or {}

    def steps(self, task: Task) -> list[int]:
        markers = self.root.glob(f"{task.id}/attempt-*/checkpoints/*/{CHECKPOINT_MARKER}")
        return sorted(int(marker.parent.name.rpartition("-")[2]) for marker in markers)

    def files(self, task: Task) -> list[Path]:
        """Return the stored files; an upload that was broken off leaves one of the store's own, which nobody reads."""
        found = self.root.glob(f"{task.id}/*/checkpoints/**/*")
        return [path for path in found if path.is_file() and not path.name.startswith(RESERVED_PREFIX)]


@pytest.fixture(params=["http", "shared"])
def shore(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shore]:
    folder = tmp_path / "shore"
    folder.mkdir()
    if request.param == "shared":
        yield Shore(folder, {"type": "local", "path": str(folder)})
        return
    with Gateway(folder) as gateway:
        env = {"GPUFLOW_WORKER_TOKEN": TOKEN, "GPUFLOW_GATEWAY_URL": gateway.url}
        yield Shore(gateway.root, {"type": "http"}, env)


def start(fleet: TestFleet, shore: Shore, *names: str) -> list[WorkerProcess]:
    """Start workers with folders of their own, all at once."""
    started = []
    for name in names:
        own = {folder: str(fleet.folder / name / folder) for folder in ("RESULTS_DIR", "GPUFLOW_CACHE_DIR")}
        started.append(fleet.spawn_worker(name, "--max-jobs", "1", env={**LEASE, **own, **shore.env}))
    return [worker.ready() for worker in started]


def begin(fleet: TestFleet, shore: Shore, **echo: Any) -> tuple[Task, WorkerProcess, WorkerProcess]:
    """Start a task on a fleet of two workers; return the one that has it, and the other one."""
    workers = start(fleet, shore, "one", "two")
    spec = {**fleet.echo(steps=STEPS, sleep_seconds=SECONDS, **echo), "output": {"destination": shore.destination}}
    task = submit(spec, app=fleet.app)
    name = eventually(lambda: task.record().worker, what="the first attempt")
    has_it, other = sorted(workers, key=lambda worker: worker.name != name)
    return task, has_it, other


def told(fleet: TestFleet, task: Task) -> list[float]:
    events = fleet.app.event_log.read(task.id, count=10_000)
    return [event.data["current"] for event in events if event.name == "progress"]


def test_kill_9_after_the_second_checkpoint(fleet: TestFleet, shore: Shore) -> None:
    gate = fleet.folder / "gate"
    task, first, other = begin(fleet, shore, checkpoint_steps=2, until_exists=str(gate))
    eventually(lambda: len(shore.steps(task)) == 2 and shore.steps(task)[0] >= 2, what="two checkpoints in the store")
    stored = shore.steps(task)[-1]

    first.send(signal.SIGKILL)
    gate.touch()

    record = task.wait(timeout=patient(60))
    assert (record.state, record.attempt, record.losses, record.worker) == ("SUCCEEDED", 2, 1, other.name)
    assert stored <= record.result["resumed_from_step"] < STEPS
    assert [entry.outcome for entry in fleet.app.ledger.attempts(task.id)] == ["lost", "succeeded"]
    results = fleet.folder / other.name / "RESULTS_DIR" / task.id
    assert results.is_dir()
    eventually(lambda: not (results / "fetched").exists(), what="the fetched checkpoint removed")
    eventually(lambda: not shore.files(task), what="no checkpoint in the store")
    assert list(shore.root.glob(f"{task.id}/attempt-2/manifest.json"))


def test_what_is_handed_back_repeats_no_step(fleet: TestFleet, shore: Shore) -> None:
    gate = fleet.folder / "gate"
    task, first, other = begin(fleet, shore, checkpoint_steps=1000, until_exists=str(gate))
    eventually(lambda: len(told(fleet, task)) >= 3, what="some steps")

    first.send(signal.SIGTERM)
    eventually(lambda: fleet.registry.find(first.name).state == "DRAINING", what="the drain")  # type: ignore[union-attr]
    first.send(signal.SIGTERM)

    assert first.process.wait(timeout=patient(60)) == 0
    gate.touch()
    record = task.wait(timeout=patient(60))
    assert (record.state, record.attempt, record.preemptions, record.worker) == ("SUCCEEDED", 2, 1, other.name)
    assert told(fleet, task) == list(range(1, STEPS + 1)), "a step was told twice, or not at all"
    eventually(lambda: not shore.files(task), what="no checkpoint in the store")


def test_a_failed_task_that_is_retried_elsewhere_goes_on(fleet: TestFleet, tmp_path: Path) -> None:
    shore = Shore(tmp_path / "shore", {"type": "local", "path": str(tmp_path / "shore")})
    (one,) = start(fleet, shore, "one")
    spec = fleet.echo(steps=4, checkpoint_steps=4, fail={"attempts": 1, "retryable": True})
    spec |= {"output": {"destination": shore.destination}, "retry": {"max_attempts": 1}}
    task = submit(spec, app=fleet.app)
    assert task.wait(timeout=patient(60)).state == "DEAD"
    assert one.stop() == 0
    start(fleet, shore, "two")

    assert task.retry()

    record = task.wait(timeout=patient(60))
    assert (record.state, record.attempt, record.worker) == ("SUCCEEDED", 2, "two")
    assert record.result["resumed_from_step"] == 4


def test_a_failure_without_backoff_comes_back_to_the_same_worker(fleet: TestFleet) -> None:
    fleet.start_worker("one", env=LEASE)
    spec = {**fleet.echo(fail={"attempts": 2, "retryable": True}), "retry": {"backoff_seconds": 0}}

    # The message can be popped again before the supervisor has heard that it is requeued: with so many, some are.
    tasks = [submit(spec, app=fleet.app) for _ in range(40)]

    for task in tasks:
        record = task.wait(timeout=patient(60))
        assert (record.state, record.attempt, record.failures, record.losses) == ("SUCCEEDED", 3, 2, 0)


def test_a_checkpoint_that_cannot_be_fetched_is_no_silent_fresh_start(fleet: TestFleet, tmp_path: Path) -> None:
    shore = Shore(tmp_path / "shore", {"type": "local", "path": str(tmp_path / "shore")})
    (one,) = start(fleet, shore, "one")
    spec = {**fleet.echo(steps=STEPS, sleep_seconds=60, checkpoint_steps=1), "retry": {"max_attempts": 1}}
    task = submit({**spec, "output": {"destination": shore.destination}}, app=fleet.app)
    eventually(lambda: shore.steps(task), what="a checkpoint in the store")
    one.send(signal.SIGKILL)
    one.process.wait(timeout=patient(10))

    for step in shore.root.glob(f"{task.id}/attempt-1/checkpoints/*/step.txt"):
        step.unlink()
    start(fleet, shore, "two")

    record = task.wait(timeout=patient(60))
    assert (record.state, record.error["type"], record.attempt) == ("DEAD", "CheckpointUnreachable", 2)
    assert "step.txt" in record.error["message"]
