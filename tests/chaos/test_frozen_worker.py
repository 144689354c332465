"""A worker is stopped (SIGSTOP) for longer than its lease and wakes up: it is refused, or goes on where nobody has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuflow.client import Task, submit
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check, leftovers
from tests.chaos.conftest import LEASE, LEASE_SECONDS, MORTAL
from tests.chaos.faults import Fault
from tests.chaos.freezing import frozen
from tests.support.fleet import TestFleet, WorkerProcess, running
from tests.support.waiting import eventually, patient


def _tree(worker: WorkerProcess) -> list[int]:
    """Return the worker and everything below it: shims and children."""
    return [worker.pid, *(process.pid for process in worker.children())]


@pytest.mark.parametrize(
    ("fields", "whole_tree"),
    [
        pytest.param({"output": "late"}, False, id="result"),
        pytest.param({"fail": {"message": "late", "attempts": 1}}, False, id="failure"),
        pytest.param({"output": "late"}, True, id="child frozen too"),
    ],
)
def test_what_a_frozen_worker_brings_late_is_refused(
    fleet: TestFleet, tmp_path: Path, fields: dict, whole_tree: bool
) -> None:
    # Given a task on a worker that is stopped, so that another starts the second attempt
    gate = tmp_path / "gate"
    first = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    task = submit(fleet.echo(until_exists=str(gate), **fields), app=fleet.app)
    eventually(lambda: task.state == "RUNNING")
    eventually(first.supervised, what="the child")
    with frozen(*(_tree(first) if whole_tree else [first.pid])):
        if not whole_tree:  # the first child ends while nobody reads what it says
            gate.touch()
            eventually(lambda: not first.supervised(), what="the end of the first child")
            gate.unlink()
        second = fleet.start_worker("w2", "--max-jobs", "1", env=LEASE)
        eventually(lambda: task.record().attempt == 2, what="the second attempt")
        token = fleet.broker.client.hget(fleet.app.keys.task(task.id), "owner_token")
        tag = fleet.broker.client.hget(fleet.app.keys.task(task.id), "tag")
        if whole_tree:  # the first child ends as soon as it wakes up, and the second one about then
            gate.touch()
    # When it wakes up beside it: then the new owner's lease stands
    eventually(lambda: _has_noticed(first), what="the loss in the log of w1")
    owner = fleet.broker.client.hget(fleet.app.keys.owners, tag)
    assert owner is not None or whole_tree
    assert owner is None or owner.startswith(f"{token}\n")
    gate.touch()
    (record,) = check(fleet, [task.id])
    assert (record.attempt, record.worker, record.losses) == (2, "w2", 1)
    assert [entry.outcome for entry in fleet.app.ledger.attempts(task.id)] == ["lost", "succeeded"]
    assert record.error is None
    assert first.process.poll() is None and second.process.poll() is None


def _has_noticed(worker: WorkerProcess) -> bool:
    signs = ("attempt_superseded", "late_result_refused", "late_failure_refused", "lease_lost", "leases_lost")
    return any(sign in worker.log() for sign in signs)


@pytest.mark.parametrize("whole_tree", [False, True], ids=["worker", "worker and child"])
def test_with_nobody_else_there_the_owner_goes_on_where_it_was(
    fleet: TestFleet, tmp_path: Path, whole_tree: bool
) -> None:
    gate = tmp_path / "gate"
    worker = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    task = submit(fleet.echo(until_exists=str(gate)), app=fleet.app)
    eventually(lambda: task.state == "RUNNING")
    (child,) = eventually(worker.supervised, what="the child")
    tag = fleet.broker.client.hget(fleet.app.keys.task(task.id), "tag")

    with frozen(*(_tree(worker) if whole_tree else [worker.pid])):
        eventually(lambda: _overdue(fleet, tag), what="the end of its lease")
    gate.touch()

    (record,) = check(fleet, [task.id])
    assert (record.attempt, record.losses, record.result["pid"]) == (1, 0, child.pid)
    assert "lease_lost" not in worker.log()
    assert "leases_lost" not in worker.log()


def test_a_lease_that_a_sweep_took_is_taken_back_if_nobody_has_begun(fleet: TestFleet, tmp_path: Path) -> None:
    # Given a worker that is stopped, and another that sweeps but has no place
    first = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    gate = tmp_path / "gate"
    task = submit(fleet.echo(until_exists=str(gate)), app=fleet.app)
    eventually(lambda: task.state == "RUNNING")
    (child,) = eventually(first.supervised, what="the child")
    fleet.start_worker("w2", "--max-jobs", "0", env=LEASE)

    with frozen(first.pid):
        eventually(lambda: fleet.broker.client.llen("cpu") == 1, what="the message back in its list")
    eventually(lambda: "lease_taken_back" in first.log(), what="the lease taken back")
    gate.touch()

    (record,) = check(fleet, [task.id])
    assert (record.attempt, record.losses, record.result["pid"]) == (1, 0, child.pid)


def _overdue(fleet: TestFleet, tag: str) -> bool:
    """Whether a lease has ended by more than the gap after which sweeps give grace, on the server's clock."""
    ends = fleet.broker.client.zscore(fleet.app.keys.leases, tag)
    seconds, micros = fleet.broker.client.time()
    return bool(ends is None or seconds + micros / 1e6 > ends + 3)


def test_after_a_pause_of_all_sweeps_every_lease_gets_grace(fleet: TestFleet, tmp_path: Path) -> None:
    # Given two workers with a task each, and leases that end while nobody can renew or sweep
    env = {"GPUFLOW_LEASE_SEC": "5"}
    workers = [fleet.start_worker(name, "--max-jobs", "1", env=env) for name in ("w1", "w2")]
    gate = tmp_path / "gate"
    tasks = [submit(fleet.echo(until_exists=str(gate)), app=fleet.app) for _ in workers]
    eventually(lambda: all(task.state == "RUNNING" for task in tasks))
    pids = {process.pid for worker in workers for process in eventually(worker.supervised)}
    tags = [fleet.broker.client.hget(fleet.app.keys.task(task.id), "tag") for task in tasks]

    first, second = workers
    with frozen(second.pid):
        with frozen(first.pid):
            eventually(lambda: all(_overdue(fleet, tag) for tag in tags), what="both leases over")
        # The first wakes alone. It must not sweep away what the second has had no chance to renew.
        eventually(lambda: "leases_graced" in first.log(), what="the grace")
        assert [Task(task.id, fleet.app).record().attempt for task in tasks] == [1, 1]

    gate.touch()
    records = check(fleet, [task.id for task in tasks], state=TaskState.SUCCEEDED)
    assert [(record.attempt, record.losses) for record in records] == [(1, 0), (1, 0)]
    assert {record.result["pid"] for record in records} == pids
    assert not running(sorted(pids))


def test_a_beat_that_was_stopped_wakes_up_and_takes_nothing_away(fleet: TestFleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    environment = {**os.environ, **LEASE, "REDIS_URL": fleet.broker.url}
    command = [sys.executable, "-m", "celery", "-A", "gpuflow", "beat", "-l", "WARNING"]
    fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    client, keys = fleet.broker.client, fleet.app.keys
    beat = subprocess.Popen(command, env=environment, cwd=fleet.folder, stderr=subprocess.DEVNULL)
    try:
        task = submit(fleet.echo(until_exists=str(gate), output="once"), app=fleet.app)
        eventually(lambda: task.state == "RUNNING")
        eventually(lambda: client.exists(f"{keys.prefix}redbeat::lock"), what="a beat at work")
        with frozen(beat.pid):
            eventually(lambda: time.time() - task.record().started_at > LEASE_SECONDS * 3, what="three leases")
        gate.touch()
        (record,) = check(fleet, [task.id])
        assert (record.attempt, record.losses) == (1, 0)
    finally:
        beat.kill()
        beat.wait(timeout=patient(30))


def test_what_is_cancelled_between_its_lease_and_its_start_is_revoked_for_celery_too(
    fleet: TestFleet, fault: Fault
) -> None:
    # Given a worker that has leased a message, and is stopped before it begins with the task
    worker = fleet.start_worker("w1", *MORTAL, env={"GPUFLOW_LEASE_SEC": "60", **fault.env})
    fault.arm("popped", signal.SIGSTOP)
    task = submit(fleet.echo(output=1), app=fleet.app)
    eventually(fault.struck, what="the worker halted with the message")

    # When the task is cancelled meanwhile
    assert task.cancel() == "cancelled"
    worker.send(signal.SIGCONT)

    # Then the worker drops it, and what Celery was told stays
    eventually(lambda: not leftovers(fleet), what="the end of the delivery")
    assert task.state == "CANCELLED" and not task.attempts()
    assert fleet.app.AsyncResult(task.id).state == "REVOKED"
