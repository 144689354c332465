"""Merged calls on a real fleet: equal ones run once, compatible ones together, and no caller hurts another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group

from gpuflow.client import Task, get, submit
from gpuflow.errors import TaskCancelled, TaskFailed
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

ECHO = "gpuflow.echo"


def call(output: Any, **more: Any) -> dict[str, Any]:
    echo = {name: more.pop(name) for name in list(more) if name in ("until_exists", "fail", "artifact", "steps", "exit_code")}
    return {"taskType": "echo", "echo": {"output": output, **echo}, "merge": "always", **more}


def counts(fleet: TestFleet) -> dict[str, int]:
    return fleet.app.merger.store.counts()


def run_of(task: Task) -> Task:
    found = get(str(task.record().run), app=task._app)
    assert isinstance(found, Task)
    return found


def runs(fleet: TestFleet) -> list[Any]:
    return [record for record in fleet.app.ledger.recent(1000) if record.is_run]


def test_equal_calls_run_once_and_each_has_its_own_end(fleet: TestFleet, tmp_path: Path) -> None:
    tasks = [submit(call({"n": 1}, artifact="note.txt"), app=fleet.app) for _ in range(5)]
    assert {task.state for task in tasks} == {"MERGED"}
    assert len({task.record().run for task in tasks}) == 1

    fleet.start_worker()

    assert [task.get(timeout=patient(30))["output"] for task in tasks] == [{"n": 1}] * 5
    (run,) = runs(fleet)
    assert (run.state, run.attempt) == ("SUCCEEDED", 1)
    for task in tasks:
        record = task.record()
        assert (record.state, record.attempt, record.worker, record.run) == ("SUCCEEDED", 1, "w1", run.id)
        folder = fleet.results / task.id
        assert json.loads((folder / "responses.json").read_text())["output"] == {"n": 1}
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {"note.txt", "responses.json"} <= {item["name"] for item in manifest["artifacts"]}
        assert record.result["result_dir"] == str(folder / "attempt-1")
        assert (folder / "note.txt").exists()
        assert eventually(lambda task=task: fleet.app.AsyncResult(task.id).state == "SUCCESS")
        assert fleet.app.AsyncResult(task.id).get(timeout=patient(10))["output"] == {"n": 1}
        assert [entry.outcome for entry in task.attempts()] == ["succeeded"]
    assert counts(fleet)["new"] == 1 and counts(fleet)["coalesced"] == 4
    assert not fleet.broker.client.keys("merge:*")


def test_a_call_joins_a_run_that_is_running(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker()
    gate = tmp_path / "gate"
    first = submit(call(1, until_exists=str(gate)), app=fleet.app)
    eventually(lambda: run_of(first).state == "RUNNING")

    second = submit(call(1, until_exists=str(gate)), app=fleet.app)
    gate.touch()

    assert [first.get(timeout=patient(30))["pid"], second.get(timeout=patient(30))["pid"]] == [first.result["pid"]] * 2
    assert len(runs(fleet)) == 1


def test_different_calls_travel_together_and_a_bad_one_fails_alone(fleet: TestFleet) -> None:
    good = [submit(call(number), app=fleet.app) for number in range(2)]
    same = submit(call(0), app=fleet.app)
    bad = submit(call(2, fail={"type": "Boom", "message": "no luck", "retryable": False}), app=fleet.app)
    assert len({task.record().run for task in (*good, same, bad)}) == 1

    fleet.start_worker()

    assert [task.get(timeout=patient(30))["output"] for task in (*good, same)] == [0, 1, 0]
    with pytest.raises(TaskFailed, match="no luck"):
        bad.get(timeout=patient(30))
    (run,) = runs(fleet)
    assert run.state == "SUCCEEDED"
    for task in good:
        folder = fleet.results / task.id
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {item["name"] for item in manifest["artifacts"]} == {"responses.json"}
        assert json.loads((folder / "responses.json").read_text())["output"] == task.result["output"]
    with pytest.raises(TaskFailed, match="no luck"):
        fleet.app.AsyncResult(bad.id).get(timeout=patient(10))


def test_a_batch_whose_process_dies_is_tried_call_by_call(fleet: TestFleet) -> None:
    retry = {"max_attempts": 1}
    good = submit(call(1, retry=retry), app=fleet.app)
    killer = submit(call(2, retry=retry, exit_code=3), app=fleet.app)
    assert run_of(good).id == run_of(killer).id

    fleet.start_worker()

    assert good.get(timeout=patient(30))["output"] == 1
    with pytest.raises(TaskFailed):
        killer.get(timeout=patient(30))
    assert counts(fleet)["regrouped"] == 2


def test_a_caller_that_is_cancelled_leaves_and_the_last_one_ends_the_run(fleet: TestFleet, tmp_path: Path) -> None:
    worker = fleet.start_worker()
    gate = tmp_path / "gate"
    first, second = (submit(call(1, until_exists=str(gate)), app=fleet.app) for _ in range(2))
    run = run_of(first)
    eventually(lambda: run.state == "RUNNING" and worker.supervised())

    assert first.cancel() == "cancelled"
    with pytest.raises(TaskCancelled):
        first.get(timeout=patient(10))
    assert run.state == "RUNNING" and worker.supervised()

    assert second.cancel() == "cancelled"
    eventually(lambda: run.state == "CANCELLED" and not worker.supervised())
    later = submit(call(1, until_exists=str(gate)), app=fleet.app)
    gate.touch()
    assert later.get(timeout=patient(30))["output"] == 1
    assert run_of(later).id != run.id


def test_a_run_that_waits_ends_with_its_last_caller_and_leaves_nothing(fleet: TestFleet) -> None:
    first, second = submit(call(1), app=fleet.app), submit(call(2), app=fleet.app)
    run = run_of(first)
    first.cancel()
    assert run.state == "QUEUED" and list(fleet.app.merger.store.calls(run.id).values())[0]["echo"]["output"] == 2
    second.cancel()
    assert run.state == "CANCELLED"
    assert fleet.broker.client.llen("cpu") == 0
    assert not fleet.broker.client.keys("merge:*")


def test_revoke_is_a_leave(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker()
    gate = tmp_path / "gate"
    first, second = (submit(call(1, until_exists=str(gate)), app=fleet.app) for _ in range(2))
    run = run_of(first)
    eventually(lambda: run.state == "RUNNING")

    fleet.app.AsyncResult(first.id).revoke(terminate=True)

    eventually(lambda: first.state == "CANCELLED")
    assert run.state == "RUNNING"
    gate.touch()
    assert second.get(timeout=patient(30))["output"] == 1
    assert eventually(lambda: fleet.app.AsyncResult(first.id).state == "REVOKED")


def test_a_chord_a_group_with_links_and_a_chain_complete(fleet: TestFleet) -> None:
    fleet.start_worker("w1", "--include", "plain_tasks")
    echo = fleet.app.signature
    header = [echo(ECHO, kwargs={"spec": call(number % 3)}) for number in range(12)]
    body = fleet.app.signature("plain_tasks.outputs")
    told = fleet.app.signature("plain_tasks.note_output")
    linked = group(echo(ECHO, kwargs={"spec": call("linked")}).on_error(told) for _ in range(3))
    for one in linked.tasks:
        one.link(told)

    joined = chord(header, app=fleet.app)(body)
    grouped = linked.apply_async()
    chained = chain(echo(ECHO, kwargs={"spec": call("chained")}), fleet.app.signature("plain_tasks.outputs_of_one")).apply_async()

    assert joined.get(timeout=patient(60)) == [number % 3 for number in range(12)]
    assert [one["output"] for one in grouped.get(timeout=patient(60))] == ["linked"] * 3
    assert chained.get(timeout=patient(60)) == "chained"
    eventually(lambda: fleet.broker.client.llen("noted") == 3)
    assert fleet.broker.client.llen("bodies") == 1


def test_a_result_is_used_again_for_as_long_as_both_sides_say(fleet: TestFleet) -> None:
    fleet.start_worker()
    first = submit(call(1, resultTtlSeconds=600), app=fleet.app)
    first.get(timeout=patient(30))
    eventually(lambda: not fleet.broker.client.keys("merge:*:calls"))

    hit = submit(call(1, resultTtlSeconds=600), app=fleet.app)
    fresh = submit(call(1), app=fleet.app)

    assert hit.get(timeout=patient(30))["pid"] == first.result["pid"]
    assert hit.record().run == first.record().run
    assert fresh.get(timeout=patient(30))["pid"] != first.result["pid"]
    assert counts(fleet)["hit"] == 1
    assert (fleet.results / hit.id / "responses.json").exists()


def test_a_caller_of_a_result_that_is_cancelled_leaves_nothing(fleet: TestFleet) -> None:
    worker = fleet.start_worker()
    submit(call(1, resultTtlSeconds=600), app=fleet.app).get(timeout=patient(30))
    eventually(lambda: not fleet.broker.client.keys("merge:*:calls"))
    worker.stop()

    hit = submit(call(1, resultTtlSeconds=600), app=fleet.app)
    assert hit.cancel() == "cancelled"

    assert hit.state == "CANCELLED"
    assert fleet.app.AsyncResult(hit.id).state == "REVOKED"
    assert fleet.broker.client.llen("gpuflow.control") == 0
    assert not fleet.broker.client.keys("merge:*:callers:*")


def test_a_worker_that_dies_costs_an_attempt_that_nobody_notices(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.env["GPUFLOW_LEASE_SEC"] = "3"
    worker = fleet.start_worker("w1")
    gate = tmp_path / "gate"
    tasks = [submit(call(1, until_exists=str(gate)), app=fleet.app) for _ in range(3)]
    eventually(lambda: run_of(tasks[0]).state == "RUNNING")

    worker.process.kill()
    gate.touch()
    fleet.start_worker("w2")

    assert [task.get(timeout=patient(60))["output"] for task in tasks] == [1, 1, 1]
    (run,) = runs(fleet)
    assert run.attempt == 2


def test_a_more_urgent_caller_raises_the_run(fleet: TestFleet) -> None:
    low = submit(call(1, priority=1), app=fleet.app)
    other = submit({"taskType": "echo", "echo": {"output": 2}, "priority": 5}, app=fleet.app)
    high = submit(call(1, priority=9), app=fleet.app)
    fleet.start_worker("w1", "--max-jobs", "1")

    for task in (low, other, high):
        task.get(timeout=patient(30))
    assert (low.record().started_at or 0) == (high.record().started_at or 0)
    assert run_of(low).record().started_at < other.record().started_at
