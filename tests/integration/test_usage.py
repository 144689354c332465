"""Sums of what attempts have used, over real records; and a task on a simulated GPU whose driver tells its energy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpuflow.client import submit
from gpuflow.ledger import usage
from gpuflow.ledger.records import Usage
from gpuflow.ledger.states import TaskState
from gpuflow.ledger.usage import model_name, usage_rows
from tests.fixtures.simulated_nvml import SimGpu
from tests.support.boxes import Box
from tests.support.fleet import TestFleet
from tests.support.pops import begin
from tests.support.waiting import eventually

ONE = Usage(seconds=10, gpu_seconds=20, energy_joules=30, cost=40, artifact_bytes=50)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    made = TestFleet(tmp_path_factory.mktemp("brokered"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def brokered(server: TestFleet) -> TestFleet:
    """A broker without workers and without tasks."""
    server.broker.client.flushdb()
    return server


def run(fleet: TestFleet, spec: dict[str, Any], *, owner: str = "", worker: str = "w1", used: Usage = ONE) -> None:
    """Submit a task and run it as a worker would."""
    task = submit(spec, app=fleet.app, owner=owner)
    holder, _ = begin(fleet, worker)
    assert fleet.app.ledger.commit(task.id, TaskState.SUCCEEDED, holder=holder, result={}, usage=used)


def sums(fleet: TestFleet, by: Any, since: float = 0.0) -> dict[str, tuple[int, int, Usage]]:
    found = usage_rows(fleet.broker.client, fleet.app.keys, by, since)
    return {row.name: (row.tasks, row.attempts, row.usage) for row in found}


def test_use_is_summed_by_owner_worker_and_type(brokered: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "PAGE", 2)  # several pages
    for owner, worker in (("ana", "w1"), ("ana", "w2"), ("bo", "w2"), ("", "w2")):
        run(brokered, {"taskType": "echo", "echo": {"output": 1}, "merge": "never"}, owner=owner, worker=worker)
    assert sums(brokered, "owner") == {"ana": (2, 2, ONE + ONE), "bo": (1, 1, ONE), "": (1, 1, ONE)}
    assert sums(brokered, "worker") == {"w1": (1, 1, ONE), "w2": (3, 3, ONE.times(3))}
    assert sums(brokered, "type") == {"echo": (4, 4, ONE.times(4))}
    assert list(sums(brokered, "worker")) == ["w2", "w1"], "the largest first"
    assert sums(brokered, "owner", since=float(brokered.broker.client.time()[0]) + 60) == {}


def test_no_record_is_passed_over_when_others_go(brokered: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "PAGE", 1)
    for owner in ("ana", "bo", "cy"):
        run(brokered, {"taskType": "echo", "echo": {"output": 1}, "merge": "never"}, owner=owner)
    client, keys = brokered.broker.client, brokered.app.keys
    found = set()
    for task_id, record, _ in usage._records(client, keys, with_spec=False):
        found.add(record["owner"])
        client.zrem(keys.tasks, task_id)  # as an upkeep does meanwhile
    assert found == {"ana", "bo", "cy"}


def test_each_attempt_counts_for_the_worker_that_made_it(brokered: TestFleet) -> None:
    task = submit(brokered.echo(output=1), app=brokered.app)
    holder, tag = begin(brokered, "w1")
    error = {"type": "Bad", "message": "bad", "retryable": True}
    brokered.app.ledger.yield_attempt(task.id, holder, tag, reason="failed", error=error, usage=ONE)
    holder, _ = begin(brokered, "w2")
    brokered.app.ledger.commit(task.id, TaskState.SUCCEEDED, holder=holder, result={}, usage=ONE)
    assert sums(brokered, "worker") == {"w1": (1, 1, ONE), "w2": (1, 1, ONE)}
    assert sums(brokered, "type") == {"echo": (1, 2, ONE + ONE)}


def test_the_use_of_a_merged_run_is_divided_among_its_callers(brokered: TestFleet) -> None:
    # Given three callers of two owners, whose calls are one run
    app = brokered.app
    app_settings = {"merge": "always", "taskType": "echo", "echo": {"output": 1}}
    tasks = [submit(app_settings, app=app, owner="ana") for _ in range(3)]
    brokered.broker.client.hset(app.keys.task(tasks[2].id), "owner", "bo")
    run_id = tasks[0].record().run
    holder, _ = begin(brokered, "w1")
    result = {"children": {tasks[0].record().call: {"output": 1}}}
    assert app.ledger.commit(run_id, TaskState.SUCCEEDED, holder=holder, result=result, usage=ONE)
    app.merger.complete(run_id)
    assert all(task.state == "SUCCEEDED" for task in tasks)
    # Then each owner bears its part, and the whole is what was used
    found = sums(brokered, "owner")
    assert {name: tasks for name, (tasks, _, _) in found.items()} == {"ana": 2, "bo": 1}
    assert found["ana"][2].gpu_seconds == pytest.approx(40 / 3) and found["bo"][2].gpu_seconds == pytest.approx(20 / 3)
    assert sums(brokered, "worker") == {"w1": (0, 1, ONE)}


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"model": {"source": {"type": "huggingface", "identifier": "a/b"}}}, "a/b"),
        ({"model": {"source": {"type": "local", "path": "/models/x"}}}, "/models/x"),
        ({"model": {"source": {}}}, ""),
        ({"model": "odd"}, ""),
        ({}, ""),
    ],
)
def test_the_name_of_a_model(spec: dict[str, Any], name: str) -> None:
    assert model_name(spec) == name


def test_a_task_on_a_gpu_has_its_seconds_energy_and_cost(fleet: TestFleet) -> None:
    # Given a task on one of two GPUs, each of which has used 5 kJ before, and 1.5 kJ more while it runs
    with Box(fleet, "two", [SimGpu(energy_mj=5_000_000)] * 2) as box:
        box.start("w1", "--cost", "7.2")
        task = box.held("A100:1")
        box.become([SimGpu(energy_mj=6_500_000)] * 2)
        # When it ends, however that is
        task.cancel()
        eventually(lambda: task.state == "CANCELLED", within=60, what="its end")
    # Then its record has its GPU-seconds, the energy of its GPU, and half of what the machine costs
    used = task.record().usage
    assert used.seconds > 0 and used.gpu_seconds == pytest.approx(used.seconds)
    assert used.energy_joules == 1500
    assert used.cost == pytest.approx(7.2 / 2 * used.seconds / 3600, abs=2e-6)
    (attempt,) = task.attempts()
    assert attempt.usage == used
