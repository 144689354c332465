"""Merged calls on a real fleet: equal ones run once, compatible ones together, and no caller hurts another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import result_from_tuple

from gpuflow.broker.merged_calls import CALLER_PRIORITY
from gpuflow.broker.priorities import list_key
from gpuflow.celery_app import GPUFlow
from gpuflow.client import Task, get, submit, submit_pipeline
from gpuflow.errors import TaskCancelled, TaskDead, TaskFailed, UnknownTask
from gpuflow.explaining import explain
from gpuflow.ledger.states import TaskState
from gpuflow.routing.families import CONTROL_QUEUE
from tests.fixtures.fleets import OPTIONS
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

ECHO = "gpuflow.echo"
#: The list of the control queue in which callers wait for their end.
CONTROL_OF_CALLERS = list_key(CONTROL_QUEUE, CALLER_PRIORITY)


def call(output: Any, **more: Any) -> dict[str, Any]:
    echo = {
        name: more.pop(name)
        for name in list(more)
        if name in ("until_exists", "fail", "artifact", "steps", "exit_code")
    }
    return {"taskType": "echo", "echo": {"output": output, **echo}, "merge": "always", **more}


def counts(fleet: TestFleet) -> dict[str, int]:
    return fleet.app.merger.store.counts()


def run_of(task: Task) -> Task:
    found = get(str(task.record().run), app=task._app)
    assert isinstance(found, Task)
    return found


def runs(fleet: TestFleet) -> list[Any]:
    return [record for record in fleet.app.ledger.recent(1000) if record.is_run]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """A broker and one worker, which runs one task at a time, for the tests whose outputs are theirs alone."""
    made = TestFleet(tmp_path_factory.mktemp("shared"), options=OPTIONS)
    try:
        made.start_worker("w1", "--max-jobs", "1")
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def waiting_queue(fleet: TestFleet, folder: Path) -> Iterator[None]:
    """Keep the worker of `shared` busy, so that what is submitted inside waits until the end of the block."""
    gate = folder / "end-of-the-wait"
    busy = submit({**call("busy", until_exists=str(gate)), "merge": "never"}, app=fleet.app)
    eventually(lambda: busy.state == "RUNNING")
    try:
        yield
    finally:
        gate.touch()


def test_equal_calls_run_once_and_each_has_its_own_end(shared: TestFleet, tmp_path: Path) -> None:
    before = counts(shared)
    with waiting_queue(shared, tmp_path):
        tasks = [submit(call({"n": 1}, artifact="note.txt"), app=shared.app) for _ in range(5)]
        assert {task.state for task in tasks} == {"MERGED"}
        assert len({task.record().run for task in tasks}) == 1

    assert [task.get(timeout=patient(30))["output"] for task in tasks] == [{"n": 1}] * 5
    run = run_of(tasks[0]).record()
    assert (run.state, run.attempt) == ("SUCCEEDED", 1)
    for task in tasks:
        record = task.record()
        assert (record.state, record.attempt, record.worker, record.run) == ("SUCCEEDED", 1, "w1", run.id)
        folder = shared.results / task.id
        assert json.loads((folder / "responses.json").read_text())["output"] == {"n": 1}
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {"note.txt", "responses.json"} <= {item["name"] for item in manifest["artifacts"]}
        assert record.result["result_dir"] == str(folder / "attempt-1")
        assert (folder / "note.txt").exists()
        assert eventually(lambda task=task: shared.app.AsyncResult(task.id).state == "SUCCESS")
        assert shared.app.AsyncResult(task.id).get(timeout=patient(10))["output"] == {"n": 1}
        assert [entry.outcome for entry in task.attempts()] == ["succeeded"]
    assert {name: counts(shared)[name] - before.get(name, 0) for name in ("new", "coalesced")} == {
        "new": 1,
        "coalesced": 4,
    }
    assert not shared.broker.client.keys(f"merge:*{run.id}*")


def test_a_call_joins_a_run_that_is_running(shared: TestFleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = submit(call(1, until_exists=str(gate)), app=shared.app)
    eventually(lambda: run_of(first).state == "RUNNING")

    second = submit(call(1, until_exists=str(gate)), app=shared.app)
    gate.touch()

    assert [first.get(timeout=patient(30))["pid"], second.get(timeout=patient(30))["pid"]] == [first.result["pid"]] * 2
    assert first.record().run == second.record().run


def test_different_calls_travel_together_and_a_bad_one_fails_alone(shared: TestFleet, tmp_path: Path) -> None:
    with waiting_queue(shared, tmp_path):
        good = [submit(call(number), app=shared.app) for number in range(2)]
        same = submit(call(0), app=shared.app)
        bad = submit(call(2, fail={"type": "Boom", "message": "no luck", "retryable": False}), app=shared.app)
        assert len({task.record().run for task in (*good, same, bad)}) == 1

    assert [task.get(timeout=patient(30))["output"] for task in (*good, same)] == [0, 1, 0]
    with pytest.raises(TaskFailed, match="no luck"):
        bad.get(timeout=patient(30))
    assert run_of(bad).state == "SUCCEEDED"
    for task in good:
        folder = shared.results / task.id
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {item["name"] for item in manifest["artifacts"]} == {"responses.json"}
        assert json.loads((folder / "responses.json").read_text())["output"] == task.result["output"]
    with pytest.raises(TaskFailed, match="no luck"):
        shared.app.AsyncResult(bad.id).get(timeout=patient(10))


def test_a_batch_whose_process_dies_is_tried_call_by_call(shared: TestFleet, tmp_path: Path) -> None:
    before = counts(shared).get("regrouped", 0)
    retry = {"max_attempts": 1}
    with waiting_queue(shared, tmp_path):
        good = submit(call(1, retry=retry), app=shared.app)
        killer = submit(call(2, retry=retry, exit_code=3), app=shared.app)
        assert run_of(good).id == run_of(killer).id

    assert good.get(timeout=patient(30))["output"] == 1
    with pytest.raises(TaskFailed):
        killer.get(timeout=patient(30))
    assert counts(shared)["regrouped"] - before == 2


def test_a_caller_that_is_cancelled_leaves_and_the_last_one_ends_the_run(shared: TestFleet, tmp_path: Path) -> None:
    (worker,) = shared.workers
    gate = tmp_path / "gate"
    first, second = (submit(call(1, until_exists=str(gate)), app=shared.app) for _ in range(2))
    run = run_of(first)
    eventually(lambda: run.state == "RUNNING" and worker.supervised())

    assert first.cancel() == "cancelled"
    with pytest.raises(TaskCancelled):
        first.get(timeout=patient(10))
    assert run.state == "RUNNING" and worker.supervised()

    assert second.cancel() == "cancelled"
    eventually(lambda: run.state == "CANCELLED" and not worker.supervised())
    later = submit(call(1, until_exists=str(gate)), app=shared.app)
    gate.touch()
    assert later.get(timeout=patient(30))["output"] == 1
    assert run_of(later).id != run.id


def test_a_run_that_waits_ends_with_its_last_caller_and_leaves_nothing(fleet: TestFleet) -> None:
    first, second = submit(call(1), app=fleet.app), submit(call(2), app=fleet.app)
    run = run_of(first)
    first.cancel()
    assert run.state == "QUEUED" and [
        one.spec["echo"]["output"] for one in fleet.app.merger.store.calls(run.id).values()
    ] == [2]
    second.cancel()
    assert run.state == "CANCELLED"
    assert fleet.broker.client.llen("cpu") == 0
    assert not fleet.broker.client.keys("merge:*")


def test_revoke_is_a_leave(shared: TestFleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first, second = (submit(call(1, until_exists=str(gate)), app=shared.app) for _ in range(2))
    run = run_of(first)
    eventually(lambda: run.state == "RUNNING")

    shared.app.AsyncResult(first.id).revoke(terminate=True)

    eventually(lambda: first.state == "CANCELLED")
    assert run.state == "RUNNING"
    gate.touch()
    assert second.get(timeout=patient(30))["output"] == 1
    assert eventually(lambda: shared.app.AsyncResult(first.id).state == "REVOKED")


def test_a_chord_a_group_with_links_and_a_chain_complete(fleet: TestFleet) -> None:
    fleet.start_worker("w1", "--include", "plain_tasks")
    echo = fleet.app.signature
    outputs = ["same"] * 150 + list(range(50))
    header = [echo(ECHO, kwargs={"spec": call(output)}) for output in outputs]
    body = fleet.app.signature("plain_tasks.outputs")
    told = fleet.app.signature("plain_tasks.note_output")
    linked = group(echo(ECHO, kwargs={"spec": call("linked")}).on_error(told) for _ in range(3))
    for one in linked.tasks:
        one.link(told)

    joined = chord(header, app=fleet.app)(body)
    grouped = linked.apply_async()
    chained = chain(
        echo(ECHO, kwargs={"spec": call("chained")}), fleet.app.signature("plain_tasks.outputs_of_one")
    ).apply_async()

    assert joined.get(timeout=patient(120)) == outputs
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
    assert not fleet.broker.client.keys("merge:*:callers:*")
    fleet.start_worker("w2")  # to it comes the message that was to fetch the result
    eventually(lambda: fleet.broker.client.llen(CONTROL_OF_CALLERS) == 0)
    eventually(lambda: not fleet.broker.client.hgetall("gpuflow.unacked"))
    assert fleet.app.AsyncResult(hit.id).state == "REVOKED"


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


def test_a_caller_tells_what_its_run_tells_of_its_call(shared: TestFleet, tmp_path: Path) -> None:
    with waiting_queue(shared, tmp_path):
        one, other = (submit(call(number, steps=number), app=shared.app) for number in (2, 3))
    for task in (one, other):
        task.get(timeout=patient(30))

    def steps(task: Task) -> list[Any]:
        return [
            event.data["current"]
            for event in task.events()
            if event.name == "progress" and event.data.get("unit") != "child" and event.source == task.id
        ]

    def states(task: Task) -> list[Any]:
        return [event.data["state"] for event in task.events() if event.name == "state"]

    assert (steps(one)[-1], steps(other)[-1]) == (2, 3)
    assert states(one) == ["MERGED", "QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]


def test_a_merged_call_is_explained_by_its_run_and_counted(fleet: TestFleet) -> None:
    first = submit(call(1, resources={"accelerators": "A100:1"}), app=fleet.app)
    submit(call(1, resources={"accelerators": "A100:1"}), app=fleet.app)
    (told,) = explain(first.id, app=fleet.app)
    assert told.outcome == "cannot" and told.queue.name == "gpu-a100"
    assert first.status()["coalescedInto"] == run_of(first).id
    assert counts(fleet) == {"calls": 2, "coalesced": 1, "new": 1}


def test_a_stage_of_equal_calls_is_one_execution(shared: TestFleet) -> None:
    spec = call("same")
    run = submit_pipeline(
        {
            "apiVersion": "gpuflow/v1",
            "kind": "Pipeline",
            "metadata": {"name": "twice"},
            "spec": {
                "stages": [
                    {"name": "ask", "spec": spec},
                    {"name": "again", "dependsOn": ["ask"], "spec": call("${ask.result.output}")},
                ]
            },
        },
        app=shared.app,
    )
    run.wait(timeout=patient(60))
    assert (run["ask"].result or {})["output"] == (run["again"].result or {})["output"] == "same"


def test_a_retried_caller_runs_by_itself_and_a_run_has_no_retry(shared: TestFleet, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    fail = {"type": "Boom", "message": "not yet", "retryable": False, "unless_exists": str(flag)}
    one, other = (submit(call(1, fail=fail), app=shared.app) for _ in range(2))
    for task in (one, other):
        with pytest.raises(TaskFailed, match="not yet"):
            task.get(timeout=patient(30))
    run = run_of(one)
    flag.touch()

    assert one.retry()
    assert one.get(timeout=patient(30))["output"] == 1
    assert one.record().run is None
    assert other.state == "FAILED"
    with pytest.raises(UnknownTask, match="retry the tasks that it served"):
        run.retry()


def test_an_operator_who_cancels_a_run_cancels_its_callers(fleet: TestFleet) -> None:
    tasks = [submit(call(1), app=fleet.app) for _ in range(2)]
    fleet.start_worker("w1", "-Q", "gpu-a100")  # serves the control queue, and not this one
    assert run_of(tasks[0]).cancel() == "cancelled"
    for task in tasks:
        with pytest.raises(TaskCancelled):
            task.get(timeout=patient(30))
        assert eventually(lambda task=task: fleet.app.AsyncResult(task.id).state == "REVOKED")
    assert not fleet.broker.client.keys("merge:*")


def test_owners_do_not_share_unless_the_operator_says_so(fleet: TestFleet) -> None:
    for owner in ("ana", "bo"):
        submit(call(1), app=fleet.app, owner=owner)
    assert counts(fleet)["new"] == 2
    shared = GPUFlow("shared", settings=fleet.settings.model_copy(update={"merge_across_owners": True}))
    try:
        for owner in ("ana", "bo"):
            submit(call(1), app=shared, owner=owner)
    finally:
        shared.close()
        shared.redis.close()
    assert counts(fleet)["new"] == 3


def test_nothing_is_merged_where_it_is_switched_off(fleet: TestFleet) -> None:
    plain = GPUFlow("plain", settings=fleet.settings.model_copy(update={"enable_task_merge": False}))
    try:
        assert submit(call(1), app=plain).state == "QUEUED"
    finally:
        plain.close()
        plain.redis.close()
    limited = fleet.app.send_task(ECHO, kwargs={"spec": call(1)}, countdown=60)
    assert fleet.state(limited.id) == "QUEUED"
    assert counts(fleet) == {}


def test_results_are_bounded_in_number_and_bytes(fleet: TestFleet) -> None:
    fleet.env["GPUFLOW_MERGE_MAX_RESULTS"] = "2"
    fleet.start_worker()
    for number in range(4):
        submit(call(number, resultTtlSeconds=600), app=fleet.app).get(timeout=patient(30))
        eventually(lambda: not fleet.broker.client.keys("merge:*:calls"))
    assert fleet.broker.client.zcard("gpuflow.merge.results") == 2
    assert len(fleet.broker.client.keys("merge:call:*")) == 2
    kept = [int(size) for size in fleet.broker.client.hvals("gpuflow.merge.sizes")]
    assert counts(fleet)["kept_bytes"] == sum(kept)


@pytest.fixture
def plain(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sends the team's own tasks as a client does that has their module: it knows their options."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "support"))
    import plain_tasks

    options_of = {
        "merged_by_name": {"merge": plain_tasks.first_argument, "resources": "cpu", "merge_result_ttl": 600},
    }

    def send(name: str, *args: Any, **options: Any) -> Any:
        known = SimpleNamespace(**options_of.get(name, {"merge": True}))
        return fleet.app.send_task(f"plain_tasks.{name}", args, task_type=known, **options)

    return send


def executed(fleet: TestFleet) -> list[str]:
    return list(fleet.broker.client.lrange("executed", 0, -1))


def test_a_teams_own_task_is_merged_by_its_arguments_or_its_key(fleet: TestFleet, plain: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    sums = [plain("merged_sum", 1, 2, str(gate)) for _ in range(3)]
    others = [
        plain("merged_sum", 2, 2, str(gate)),
        plain("merged_by_name", "ana", 1),
        plain("merged_by_name", "ana", 2),
    ]
    unmerged = [plain("merged_by_name", "") for _ in range(2)]
    fleet.start_worker("w1", "--include", "plain_tasks")
    sums.append(plain("merged_sum", 1, 2, str(gate)))
    gate.touch()

    assert [one.get(timeout=patient(30)) for one in sums] == [{"sum": 3}] * 4
    assert [one.get(timeout=patient(30)) for one in others] == [{"sum": 4}, "hello ana", "hello ana"]
    assert [one.get(timeout=patient(30)) for one in unmerged] == ["hello "] * 2
    assert sorted(executed(fleet)) == ["", "", "1+2", "2+2", "ana"]
    assert plain("merged_by_name", "ana", 3).get(timeout=patient(30)) == "hello ana"
    assert executed(fleet).count("ana") == 1
    assert fleet.state(sums[0].id) == "SUCCEEDED"
    sent = [result_from_tuple(plain("merged_sending", 4).get(timeout=patient(30)), app=fleet.app) for _ in range(2)]
    assert [one.get(timeout=patient(30)) for one in sent] == [8, 8]


def test_the_exception_of_a_teams_own_task_reaches_each_caller(fleet: TestFleet, plain: Any) -> None:
    import plain_tasks

    callers = [plain("merged_failure", "no luck") for _ in range(3)]
    fleet.start_worker("w1", "--include", "plain_tasks")
    for caller in callers:
        with pytest.raises(plain_tasks.Unlucky, match="no luck"):
            caller.get(timeout=patient(30))
    assert executed(fleet) == ["no luck"]


def test_a_retry_of_a_teams_own_task_is_one_of_its_run(fleet: TestFleet, plain: Any) -> None:
    callers = [plain("merged_retry", 7) for _ in range(2)]
    fleet.start_worker("w1", "--include", "plain_tasks")
    assert [caller.get(timeout=patient(30)) for caller in callers] == [3, 3]
    assert executed(fleet) == ["7"] * 3
    (run,) = runs(fleet)
    assert (run.attempt, run.failures) == (3, 2)


def test_links_of_a_teams_own_task_are_called_once_each(fleet: TestFleet, plain: Any) -> None:
    note = fleet.app.signature("plain_tasks.note_output")
    callers = [plain("merged_sum", 1, 1, link=note.clone(kwargs={})) for _ in range(3)]
    fleet.start_worker("w1", "--include", "plain_tasks")
    assert [caller.get(timeout=patient(30)) for caller in callers] == [{"sum": 2}] * 3


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"serializer": "yaml"}])
def test_a_caller_with_another_encoding_runs_by_itself(
    shared: TestFleet, tmp_path: Path, options: dict[str, str]
) -> None:
    shared.app.conf.accept_content = ["json", "yaml"]
    with waiting_queue(shared, tmp_path):
        odd = shared.app.send_task(ECHO, kwargs={"spec": call(1)}, **options)
        usual = submit(call(1), app=shared.app)
        assert shared.state(odd.id) == "QUEUED" and usual.state == "MERGED"
    assert usual.get(timeout=patient(30))["output"] == 1
    eventually(lambda: shared.state(odd.id) in ("SUCCEEDED", "FAILED"))


@pytest.mark.parametrize("task_id", ["../../outside", "/tmp/outside-of-results", "x" * 300, "a/attempt-1", "nul\0"])
def test_an_id_that_names_no_folder_is_not_merged(shared: TestFleet, tmp_path: Path, task_id: str) -> None:
    with waiting_queue(shared, tmp_path):
        usual = submit(call(1, artifact="note.txt"), app=shared.app)
        odd = shared.app.send_task(ECHO, kwargs={"spec": call(1, artifact="note.txt")}, task_id=task_id)
        assert shared.state(odd.id) == "QUEUED"
    assert usual.get(timeout=patient(30))["output"] == 1
    assert not (shared.folder / "outside").exists() and not Path("/tmp/outside-of-results").exists()


def test_a_retry_by_hand_while_the_end_is_on_its_way_runs_in_its_own_queue(fleet: TestFleet) -> None:
    fail = {"type": "Boom", "message": "no luck", "retryable": False}
    task = submit(call(1, fail=fail, resources={"accelerators": "A100:1"}), app=fleet.app)
    run = run_of(task).record()
    fleet.app.ledger.commit(run.id, TaskState.FAILED, holder=None, error=fail)
    fleet.app.merger.complete(run.id)
    fleet.broker.client.delete("gpu-a100")  # the message of the run
    assert task.state == "FAILED" and task.retry()

    fleet.start_worker()  # it has no GPU, and serves the control queue

    eventually(lambda: fleet.broker.client.llen(CONTROL_OF_CALLERS) == 0)
    eventually(lambda: not fleet.broker.client.hgetall("gpuflow.unacked"))
    assert task.state == "QUEUED" and task.record().attempt == 0
    assert fleet.broker.client.llen("gpu-a100") == 1


def test_a_ttl_of_half_a_second_keeps_a_result_for_that_long(fleet: TestFleet) -> None:
    fleet.start_worker()
    first = submit(call(1, resultTtlSeconds=0.5), app=fleet.app)
    first.get(timeout=patient(30))
    eventually(lambda: not fleet.broker.client.hgetall("gpuflow.unacked"))
    eventually(lambda: not fleet.broker.client.keys("merge:call:*"))


def test_a_revoked_caller_whose_end_is_on_its_way_gets_that_end(fleet: TestFleet) -> None:
    """Its message waits in the control queue; dropped as revoked, its chord would never be counted."""
    fleet.start_worker("w1", "--include", "plain_tasks", "-Q", "gpu-a100")
    header = [fleet.app.signature(ECHO, kwargs={"spec": call("x")}) for _ in range(2)]
    body = chord(header, app=fleet.app)(fleet.app.signature("plain_tasks.outputs"))
    (run,) = runs(fleet)
    ids = [one.id for one in body.parent.results]
    fleet.app.control.revoke(ids, reply=True, limit=1, timeout=patient(5))
    for one in ids:
        eventually(lambda one=one: fleet.state(one) == "CANCELLED")
    eventually(lambda: fleet.state(run.id) == "CANCELLED")


def test_celery_sees_the_progress_of_the_run(shared: TestFleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    task = submit(call(1, until_exists=str(gate)), app=shared.app)
    result = shared.app.AsyncResult(task.id)
    eventually(lambda: result.state in ("STARTED", "PROGRESS"))
    gate.touch()
    assert result.get(timeout=patient(30))["output"] == 1


def test_a_dead_run_is_no_dead_letter_and_all_of_them_can_be_retried(shared: TestFleet) -> None:
    before = {record.id for record in shared.app.ledger.dead()}
    fail = {"type": "Boom", "message": "no luck", "retryable": True}
    task = submit(call(1, fail=fail, retry={"max_attempts": 1}), app=shared.app)
    with pytest.raises(TaskDead):
        task.get(timeout=patient(30))
    assert {record.id for record in shared.app.ledger.dead()} - before == {task.id}
