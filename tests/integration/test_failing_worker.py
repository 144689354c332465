"""A worker that cannot do the work draws no tasks in: what failed there goes to others, a full disk takes none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gpuflow.client import submit
from gpuflow.explaining import explain
from gpuflow.fleet.registry import Fleet
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient


def test_what_failed_on_a_worker_is_not_popped_there_while_others_may_take_it(fleet: TestFleet, tmp_path: Path) -> None:
    # Given two workers, of which the other is busy
    gate, after = tmp_path / "gate", tmp_path / "after"
    first = fleet.start_worker("w1", "--max-jobs", "1")
    blocking = submit(fleet.echo(until_exists=str(gate)), app=fleet.app)
    eventually(lambda: blocking.state == "RUNNING", what="w1 busy")
    second = fleet.start_worker("w2", "--max-jobs", "1")
    also = submit(fleet.echo(until_exists=str(after)), app=fleet.app)
    eventually(lambda: also.state == "RUNNING", what="w2 busy")

    # When a task fails on the first one
    fail = {"message": "no room here", "retryable": True, "attempts": 1}
    task = submit(fleet.echo(output=1, fail=fail) | {"retry": {"backoff_seconds": 0}}, app=fleet.app)
    gate.touch()
    eventually(lambda: task.record().failures == 1, what="the first attempt to fail")

    # Then that one takes what came later, again and again, and leaves it where it is
    for number in range(5):
        assert submit(fleet.echo(output=number), app=fleet.app).get(timeout=patient(30))["output"] == number
    assert task.state == "QUEUED"
    assert "delivery_passed_on" not in first.log()
    after.touch()
    assert task.get(timeout=patient(30))["attempt"] == 2
    assert [entry.worker for entry in fleet.app.ledger.attempts(task.id)] == ["w1", "w2"]
    assert "delivery_passed_on" not in second.log()
    assert fleet.broker.client.zcard("gpuflow.avoided") == 0


def test_a_worker_with_a_full_disk_takes_nothing_and_says_so(fleet: TestFleet) -> None:
    full = fleet.start_worker("full", env={"GPUFLOW_DISK_FLOOR_BYTES": str(2**60)})
    task = submit(fleet.echo(output=1), app=fleet.app)

    (told,) = explain(task.id, app=fleet.app)

    assert "of disk free, less than its floor of" in told.verdict and told.verdict.endswith("; make room there")
    assert [(worker.worker, worker.kind) for worker in told.capable] == [("full", "disk_full")]
    environment = {**os.environ, "REDIS_URL": fleet.broker.url, "HOME": str(fleet.folder)}
    command = [str(Path(sys.executable).with_name("gpuflow"))]
    workers = subprocess.run([*command, "workers"], env=environment, capture_output=True, text=True, check=True).stdout
    assert "disk full" in workers
    checks = subprocess.run([*command, "doctor", "--json"], env=environment, capture_output=True, text=True).stdout
    assert "GPUFLOW_DISK_FLOOR_BYTES" in json.dumps(json.loads(checks))
    assert task.state == "QUEUED"
    fleet.start_worker("roomy")
    assert task.get(timeout=patient(30))["output"] == 1
    assert task.record().worker == "roomy"
    assert Fleet(fleet.app.redis, fleet.app.keys).find("full") is not None
    assert full.process.poll() is None
    assert "event=disk_below_the_floor" in full.log()
