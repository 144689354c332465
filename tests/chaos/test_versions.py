"""Two versions of workers on one broker: the old one drains while the new one takes over."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpuflow import submission
from gpuflow.client import submit
from gpuflow.fleet.registry import WorkerState
from gpuflow.ledger import ledger, records
from gpuflow.worker import supervisor
from tests.chaos.accounting import check
from tests.chaos.conftest import LEASE
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

#: Where the schema number is used; `newer_version` changes the same in a worker, and so is not imported here.
MODULES = (ledger, records, submission, supervisor)
CURRENT = records.RECORD_SCHEMA
NEWER = CURRENT + 1
HERE = str(Path(__file__).resolve().parent)


def be_of(schema: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process be of the version that reads this schema, and writes it."""
    for module in MODULES:
        monkeypatch.setattr(module, "RECORD_SCHEMA", schema)
    monkeypatch.setattr(records, "COMMON_SCHEMA", schema)


def test_the_old_hands_back_what_is_newer_and_the_new_runs_what_is_older(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    be_of(CURRENT, monkeypatch)
    old = fleet.start_worker("old", "--max-jobs", "2", env=LEASE)
    running = submit(fleet.echo(until_exists=str(gate), output="old"), app=fleet.app)
    eventually(lambda: running.state == "RUNNING")

    # A newer client submits while only the old worker is there: it takes nothing of it.
    be_of(NEWER, monkeypatch)
    newer = [submit(fleet.echo(output=number), app=fleet.app) for number in range(3)]
    eventually(lambda: "delivery_passed_on" in old.log(), what="the old worker hands a newer task back")
    assert all(task.record().attempt == 0 for task in newer)

    new = fleet.start_worker(
        "new",
        "--max-jobs",
        "1",
        "--include",
        "newer_version",
        env={**LEASE, "PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])},
    )
    old.send(signal.SIGTERM)
    eventually(lambda: fleet.registry.find("old").state is WorkerState.DRAINING, what="the old worker draining")
    be_of(CURRENT, monkeypatch)
    older = submit(fleet.echo(output="older"), app=fleet.app)
    gate.touch()

    assert old.process.wait(timeout=patient(60)) == 0
    ended = check(fleet, [running.id, older.id, *(task.id for task in newer)])
    assert [record.worker for record in ended] == ["old", "new", "new", "new", "new"]
    assert all(record.attempt == 1 for record in ended)
    assert new.process.poll() is None


def test_versions_that_cannot_work_side_by_side_never_do(fleet: TestFleet) -> None:
    newer = ("--include", "newer_protocol")
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    env = {**LEASE, "PYTHONPATH": path, "HEARTBEAT_INTERVAL_SEC": "1"}
    old = fleet.start_worker("old", env=env)

    # A newer one does not start while the older one lives, and says what to do.
    too_early = fleet.spawn_worker("new", *newer, env=env)
    assert too_early.process.wait(timeout=patient(60)) == 2
    assert "drain and upgrade first: gpuflow workers drain old" in too_early.log()
    assert old.process.poll() is None

    # Where both got in at once, the older one drains.
    fleet.app.redis.zadd(fleet.app.keys.protocol, {"oldest": 2}, gt=True)
    assert old.process.wait(timeout=patient(60)) == 0
    assert "event=too_old_for_the_fleet" in old.log()

    new = fleet.start_worker("new", *newer, env=env)
    late = fleet.spawn_worker("late", env=env)
    assert late.process.wait(timeout=patient(60)) == 2
    assert "this fleet works with 2 or newer; upgrade gpuflow on this machine" in late.log()
    assert submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))["output"] == 1
    assert new.process.poll() is None
