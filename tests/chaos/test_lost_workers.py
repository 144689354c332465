"""Workers and shims that are gone: what they ran can be cancelled, and nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.client import submit
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check, check_orphans
from tests.chaos.conftest import LEASE
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually


def shown(fleet: TestFleet, *command: str) -> Any:
    """Return what a command prints as JSON."""
    environment = {**os.environ, "REDIS_URL": fleet.broker.url, "HOME": str(fleet.folder)}
    program = [str(Path(sys.executable).with_name("gpuflow")), *command, "--json"]
    return json.loads(subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout)


def test_a_task_whose_worker_is_gone_is_cancelled_at_once_without_another_worker(fleet: TestFleet) -> None:
    worker = fleet.start_worker("w1", env=LEASE)
    task = submit(fleet.echo(until_exists="/nowhere"), app=fleet.app)
    eventually(lambda: task.state == "RUNNING", what="the task running")
    worker.send(signal.SIGKILL)
    client, keys = fleet.broker.client, fleet.app.keys
    tag = client.hget(keys.task(task.id), "tag")
    seconds = client.time
    eventually(lambda: float(client.zscore(keys.leases, tag) or 0) < seconds()[0], what="the end of the lease")

    assert task.cancel() == "cancelled"

    assert task.state == "CANCELLED"
    assert [entry.outcome for entry in fleet.app.ledger.attempts(task.id)] == ["lost"]
    assert fleet.app.backend.get_task_meta(task.id, cache=False)["status"] == "REVOKED"
    # Nobody gets its message any more.
    fleet.start_worker("w2", env=LEASE)
    check(fleet, [submit(fleet.echo(output=1), app=fleet.app).id])
    assert task.record().attempt == 1


def test_a_cancel_that_a_worker_did_not_live_to_obey_is_obeyed_by_the_next(fleet: TestFleet) -> None:
    worker = fleet.start_worker("w1", env=LEASE)
    task = submit(fleet.echo(until_exists="/nowhere"), app=fleet.app)
    eventually(lambda: task.state == "RUNNING", what="the task running")
    worker.send(signal.SIGSTOP)
    assert task.cancel() == "requested"
    worker.send(signal.SIGKILL)

    other = fleet.start_worker("w2", env=LEASE)

    eventually(lambda: task.state == "CANCELLED", what="the cancel")
    assert [entry.outcome for entry in fleet.app.ledger.attempts(task.id)] == ["lost"]
    assert task.record().attempt == 1
    assert not other.supervised()
    check_orphans(fleet, [task.id])


@pytest.mark.parametrize("name", ["w1", "w2"], ids=["the same again", "one that cannot run it"])
def test_a_cancel_that_a_worker_did_not_live_to_obey_needs_no_worker_that_can_run_it(
    fleet: TestFleet, name: str
) -> None:
    worker = fleet.start_worker("w1", "--label", "k=5", env=LEASE)
    asked = {**fleet.echo(until_exists="/nowhere"), "resources": {"labels": {"k": "5"}}}
    task = submit(asked, app=fleet.app)
    eventually(lambda: task.state == "RUNNING", what="the task running")
    worker.send(signal.SIGSTOP)
    assert task.cancel() == "requested"
    worker.send(signal.SIGKILL)
    worker.process.wait()

    fleet.start_worker(name, env=LEASE)  # without the label

    eventually(lambda: task.state == "CANCELLED", what="the cancel")
    # Celery is told after that.
    eventually(lambda: fleet.app.backend.get_task_meta(task.id, cache=False)["status"] == "REVOKED", what="its end")
    assert fleet.broker.client.llen(task.record().queue) == 0
    check_orphans(fleet, [task.id])


@pytest.mark.parametrize("end", ["cancel", "retry"])
def test_a_shim_that_is_killed_takes_nothing_of_its_task_with_it_and_leaves_nothing(
    fleet: TestFleet, tmp_path: Path, end: str
) -> None:
    worker = fleet.start_worker("w1", env=LEASE)
    gate = tmp_path / "gate"
    task = submit(fleet.echo(children=2, until_exists=str(gate)), app=fleet.app)
    (child,) = eventually(worker.supervised, what="the child")
    eventually(lambda: len(child.children()) == 2, what="its children")
    shim = child.parent()
    assert shim is not None and shim.pid != worker.pid
    family = [child, *child.children()]

    shim.send_signal(signal.SIGKILL)

    eventually(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family))
    if end == "cancel":
        task.cancel()
        eventually(lambda: task.state == "CANCELLED", what="the cancel")
        return
    gate.touch()
    (record,) = check(fleet, [task.id], state=TaskState.SUCCEEDED)
    assert record.attempt == 2
    assert [entry.error["type"] for entry in fleet.app.ledger.attempts(task.id) if entry.error] == ["ChildLost"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_every_view_says_the_same_of_a_worker_that_is_gone(fleet: TestFleet, how: signal.Signals) -> None:
    # Given a worker that runs a task and is killed, or frozen
    worker = fleet.start_worker("w1", env={**LEASE, "HEARTBEAT_INTERVAL_SEC": "1"})
    task = submit(fleet.echo(until_exists="/nowhere"), app=fleet.app)
    eventually(lambda: task.state == "RUNNING", what="the task running")
    worker.send(how)

    # When its lease has ended, and its next heartbeat is overdue
    eventually(lambda: shown(fleet, "status", task.id)["state"] == "QUEUED", within=60, what="the loss")
    eventually(lambda: shown(fleet, "workers")[0]["state"] == "SILENT", within=60, what="the silence")

    # Then nothing tells that it runs the task, or could run another
    assert shown(fleet, "status", task.id)["lost"] is True
    (queue,) = (row for row in shown(fleet, "queues") if row["name"] == task.record().queue)
    assert (queue["waiting"], queue["running"], queue["workers"]) == (1, 0, [])
    (told,) = shown(fleet, "explain", task.id)
    assert (told["outcome"], told["workers"][0]["situation"]) == ("cannot", "silent")
    (check,) = (one for one in shown(fleet, "doctor")["checks"] if one["name"] == "silent workers")
    assert "w1 is silent" in check["detail"]
