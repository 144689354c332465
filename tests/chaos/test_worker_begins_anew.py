"""A worker that is killed and started again under its name, as systemd does: what it ran comes back at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gpuflow.client import submit
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually

#: No lease ends by itself while a test lasts.
LONG = {"GPUFLOW_LEASE_SEC": "3600"}


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_killed_worker_ran_goes_on_when_it_is_started_again(
    fleet: TestFleet, tmp_path: Path, others: int
) -> None:
    # Given a worker that runs two tasks, and perhaps another one whose lease must stay
    gate, elsewhere = tmp_path / "gate", tmp_path / "elsewhere"
    spared = []
    for n in range(others):
        fleet.start_worker(f"other{n}", "--max-jobs", "1", env=LONG)
        spared.append(submit(fleet.echo(until_exists=str(elsewhere)), app=fleet.app))
        eventually(lambda: spared[-1].state == "RUNNING")
    worker = fleet.start_worker("w1", "--max-jobs", "2", env=LONG)
    tasks = [submit(fleet.echo(output=n, until_exists=str(gate)), app=fleet.app) for n in range(2)]
    eventually(lambda: {task.state for task in tasks} == {"RUNNING"})

    # When it is killed and started again under its name
    worker.send(signal.SIGKILL)
    worker.process.wait()
    anew = fleet.start_worker("w1", "--max-jobs", "2", env=LONG)

    # Then nothing is RUNNING that does not run, from its first heartbeat on, and no lease has to end first
    for task in tasks:
        record = task.record()
        assert record.attempt == 2 or record.state == "QUEUED", record
    eventually(lambda: {task.record().attempt for task in tasks} == {2}, within=60, what="the second attempts")
    lost = anew.log().split("event=worker_lost worker=w1 queued_again=[", 1)[1].split("]", 1)[0]
    assert {task.id for task in tasks} == {part.strip(" '") for part in lost.split(",")}
    gate.touch()
    elsewhere.touch()
    eventually(lambda: {task.state for task in [*tasks, *spared]} == {"SUCCEEDED"}, within=60)
    assert [task.record().losses for task in [*tasks, *spared]] == [1, 1, *[0] * others]
    assert [task.record().attempt for task in spared] == [1] * others


def test_what_a_frozen_namesake_ran_goes_on_elsewhere(fleet: TestFleet, tmp_path: Path) -> None:
    # Given a frozen worker: its process is there, its heartbeat ends before its lease
    times = {"HEARTBEAT_INTERVAL_SEC": "1", "HEARTBEAT_TIMEOUT_SEC": "3", "GPUFLOW_LEASE_SEC": "8"}
    gate = tmp_path / "gate"
    worker = fleet.start_worker("w1", env=times)
    task = submit(fleet.echo(output=1, until_exists=str(gate)), app=fleet.app)
    eventually(lambda: task.state == "RUNNING")
    worker.send(signal.SIGSTOP)
    eventually(lambda: fleet.registry.find("w1").is_gone, within=30, what="the end of its heartbeat")

    # When another one takes its name
    fleet.start_worker("w1", env=times)

    # Then the task is begun again, and ends once
    eventually(lambda: task.record().attempt == 2, within=60, what="the second attempt")
    gate.touch()
    eventually(lambda: task.state == "SUCCEEDED", within=60)
    worker.send(signal.SIGCONT)
    assert task.record().attempt == 2
