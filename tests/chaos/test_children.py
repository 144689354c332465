"""Children that are killed, that do not listen, that have children of their own; and workers that are told to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuflow.client import Task, submit, submit_pipeline
from gpuflow.fleet.registry import Fleet, WorkerState
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check, orphans
from tests.chaos.conftest import LEASE, MORTAL
from tests.chaos.faults import Fault
from tests.support.fleet import TestFleet, WorkerProcess, gone
from tests.support.waiting import eventually, patient

CANCELS = 10


def start_pair(fleet: TestFleet) -> list[WorkerProcess]:
    return [fleet.start_worker(name, "--max-jobs", "1", env=LEASE) for name in ("w1", "w2")]


def by_role(workers: list[WorkerProcess], task: Task) -> tuple[WorkerProcess, WorkerProcess]:
    """Return the worker that runs the task, and the other one."""
    eventually(lambda: task.state == "RUNNING", what="a running task")
    busy, idle = workers if workers[0].name == task.record().worker else reversed(workers)
    return busy, idle


def test_a_killed_child_is_tried_again_on_another_worker(fleet: TestFleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    workers = start_pair(fleet)
    spec = {**fleet.echo(until_exists=str(gate), output="done"), "retry": {"backoff_seconds": 0.2}}
    task = submit(spec, app=fleet.app)
    busy, idle = by_role(workers, task)

    eventually(busy.supervised, what="the child")[0].kill()
    eventually(lambda: task.record().failures == 1, what="the failure")
    gate.touch()

    (record,) = check(fleet, [task.id])
    assert (record.attempt, record.failures, record.losses, record.worker) == (2, 1, 0, idle.name)
    first = fleet.app.ledger.attempts(task.id)[0]
    assert (first.outcome, first.error and first.error["type"]) == ("failed", "ChildKilled")


def test_grandchildren_in_other_sessions_die_with_their_worker(fleet: TestFleet, fault: Fault) -> None:
    env = {**LEASE, **fault.env, "CHAOS_SCATTER": "3"}
    workers = [fleet.start_worker(name, *MORTAL, "--max-jobs", "1", env=env) for name in ("w1", "w2")]
    task = submit(fleet.echo(sleep_seconds=3600, ignore_sigterm=True), app=fleet.app)
    busy, idle = by_role(workers, task)
    tree = eventually(lambda: found if len(found := [*orphans(fleet, [task.id])]) >= 4 else None)

    busy.send(signal.SIGKILL)

    gone(tree)
    eventually(lambda: task.record().worker == idle.name and task.state == "RUNNING", what="the task elsewhere")
    assert task.cancel() == "requested"
    (record,) = check(fleet, [task.id], state=TaskState.CANCELLED)
    assert (record.attempt, record.losses) == (2, 1)


def test_a_cancelled_child_that_does_not_listen_is_gone_soon(
    fleet: TestFleet, record_property: Callable[[str, object], None]
) -> None:
    worker = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    took = []
    tasks = []
    for _ in range(CANCELS):
        task = submit(fleet.echo(sleep_seconds=3600, ignore_sigterm=True), app=fleet.app)
        tasks.append(task.id)
        # A child reports its status when it has set its signal handlers.
        eventually(lambda: any(event.name == "worker" for event in fleet.app.event_log.read(task.id)))  # noqa: B023
        pid = worker.supervised()[0].pid
        began = time.monotonic()

        assert task.cancel() == "requested"

        gone([pid], "the child gone")
        took.append(time.monotonic() - began)
    check(fleet, tasks, state=TaskState.CANCELLED)
    took.sort()
    figure = f"p50 {took[len(took) // 2]:.2f} s, p95 {took[-1]:.2f} s over {CANCELS}"
    record_property("cancel_to_child_gone", figure)
    print(f"cancel to child gone, grace 1 s: {figure}")


def test_a_silent_child_that_does_not_listen_ends_at_its_time_limit(fleet: TestFleet) -> None:
    fleet.start_worker("w1", env=LEASE)
    spec = {**fleet.echo(sleep_seconds=3600, silent=True, ignore_sigterm=True), "timeout": "1s"}
    task = submit(spec, app=fleet.app)

    (record,) = check(fleet, [task.id], state=TaskState.FAILED)

    assert record.error is not None and record.error["type"] == "TimeLimitExceeded"


def test_a_draining_worker_finishes_takes_nothing_new_and_serves_control_tasks(
    fleet: TestFleet, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    worker = fleet.start_worker("w1", "--max-jobs", "2", env=LEASE)
    task = submit(fleet.echo(until_exists=str(gate), output="done"), app=fleet.app)
    eventually(lambda: task.state == "RUNNING")

    worker.send(signal.SIGTERM)
    eventually(lambda: _state(fleet, "w1") is WorkerState.DRAINING, what="a draining worker")
    waits = submit(fleet.echo(output="later"), app=fleet.app)
    stage = {"name": "a", "dependsOn": [], "spec": {"taskType": "echo", "echo": {"output": 1}}}
    run = submit_pipeline(
        {
            "apiVersion": "gpuflow/v1",
            "kind": "Pipeline",
            "metadata": {"name": "meanwhile"},
            "spec": {"taskType": "echo", "graph": {"nodes": [stage]}},
        },
        app=fleet.app,
    )
    dispatched = eventually(lambda: run["a"].tasks, what="a stage dispatched by the draining worker")
    assert task.state == "RUNNING"

    gate.touch()
    assert worker.process.wait(timeout=patient(30)) == 0
    assert task.state == "SUCCEEDED"
    assert (waits.state, dispatched[0].state) == ("QUEUED", "QUEUED")
    fleet.start_worker("w2", env=LEASE)
    check(fleet, [task.id, waits.id, dispatched[0].id])


@pytest.mark.parametrize("how", ["second SIGTERM", "SIGQUIT"])
def test_a_worker_that_has_to_stop_hands_its_task_back(fleet: TestFleet, tmp_path: Path, how: str) -> None:
    gate = tmp_path / "gate"
    workers = start_pair(fleet)
    echo = fleet.echo(sleep_seconds=1, steps=4, checkpoint_steps=1, until_exists=str(gate), output="done")
    task = submit(echo, app=fleet.app)
    busy, idle = by_role(workers, task)
    eventually(lambda: (task.record().progress or {}).get("current", 0) >= 2, what="two steps done")

    if how == "SIGQUIT":
        busy.send(signal.SIGQUIT)
    else:
        busy.send(signal.SIGTERM)
        eventually(lambda: _state(fleet, busy.name) is WorkerState.DRAINING, what="a draining worker")
        busy.send(signal.SIGTERM)
    assert busy.process.wait(timeout=patient(30)) == 0
    gate.touch()

    (record,) = check(fleet, [task.id])
    assert (record.attempt, record.worker) == (2, idle.name)
    assert (record.preemptions, record.failures, record.losses) == (1, 0, 0)
    assert record.result["resumed_from_step"] >= 1


def test_an_ephemeral_worker_ends_after_one_job(fleet: TestFleet) -> None:
    worker = fleet.start_worker("once", "--ephemeral", env=LEASE)
    first = submit(fleet.echo(output=1), app=fleet.app)
    eventually(lambda: first.state != "QUEUED")
    second = submit(fleet.echo(output=2), app=fleet.app)

    assert worker.process.wait(timeout=patient(30)) == 0

    assert (first.state, second.state) == ("SUCCEEDED", "QUEUED")
    second.cancel()
    check(fleet, [first.id])


def test_a_worker_id_has_one_worker_and_is_free_again_when_that_one_is_killed(fleet: TestFleet) -> None:
    first = fleet.start_worker("w1", env=LEASE)

    second = WorkerProcess(fleet.broker.url, fleet.folder / "second", "w1", env=LEASE)
    fleet.workers.append(second)

    assert second.process.wait(timeout=patient(30)) == 2
    assert f"worker id 'w1' is in use by process {first.pid}" in second.log()
    assert "Traceback" not in second.log()
    eventually(lambda: _state(fleet, "w1") is WorkerState.IDLE, what="the first one at work")

    first.send(signal.SIGKILL)
    first.process.wait(timeout=patient(30))
    fleet.start_worker("w1", env=LEASE)
    task = submit(fleet.echo(output=1), app=fleet.app)
    check(fleet, [task.id])


def _state(fleet: TestFleet, name: str) -> WorkerState | None:
    entry = Fleet(fleet.app.redis, fleet.app.keys).find(name)
    return entry.state if entry is not None else None
