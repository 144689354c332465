"""A supervised task from submit to committed result, through a real broker, worker, shim and child."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from gpuflow.client import Task, submit
from gpuflow.errors import InvalidTemplate, TaskCancelled, TaskFailed
from tests.support.bubblewrap import need_bubblewrap
from tests.support.fleet import TestFleet, WorkerProcess, gone, running
from tests.support.waiting import eventually, patient

ROOT = Path(__file__).resolve().parents[2]
HELD_SUBMIT = ROOT / "tests" / "support" / "held_submit"


def test_a_task_runs_and_its_result_is_committed_on_disk_and_in_the_record(served: TestFleet) -> None:
    task = submit(served.echo(output={"n": 1}, steps=3), app=served.app)

    result = task.get(timeout=patient(30))

    assert result["output"] == {"n": 1}
    record = task.record()
    assert (record.state, record.attempt, record.worker) == ("SUCCEEDED", 1, "w1")
    folder = served.results / task.id
    assert json.loads((folder / "responses.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {"responses.json"} <= {item["name"] for item in manifest["artifacts"]}
    assert (folder / "manifest.json").resolve().parent.name == "attempt-1"
    states = [event.data["state"] for event in served.app.event_log.read(task.id) if event.name == "state"]
    assert states == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]
    steps = [event.data["current"] for event in served.app.event_log.read(task.id) if event.name == "progress"]
    assert steps == sorted(steps) and steps[-1] == 3
    celery_result = served.app.AsyncResult(task.id)
    assert eventually(lambda: celery_result.state == "SUCCESS")
    assert celery_result.get(timeout=patient(5))["output"] == {"n": 1}


def test_the_names_of_a_result_are_there_after_a_worker_that_died_before_it_made_them(served: TestFleet) -> None:
    task = submit(served.echo(output="once"), app=served.app)
    task.get(timeout=patient(30))
    folder = served.results / task.id
    assert eventually(lambda: served.app.AsyncResult(task.id).state == "SUCCESS")  # comes after them
    names = {path.name for path in folder.iterdir() if path.is_symlink()}
    assert "responses.json" in names
    for name in names:
        (folder / name).unlink()

    raw, key = served.app.redis.hmget(served.app.keys.task(task.id), "message", "list")
    served.broker.client.lpush(key, raw)  # what a sweep does with the message that a dead worker has not acknowledged

    eventually(lambda: {path.name for path in folder.iterdir() if path.is_symlink()} == names, what="the links")
    assert task.record().attempt == 1


def test_a_failing_child_fails_its_task_with_the_cause(served: TestFleet) -> None:
    task = submit(served.echo(fail={"type": "Boom", "message": "no luck", "retryable": False}), app=served.app)

    with pytest.raises(TaskFailed, match="no luck"):
        task.get(timeout=patient(30))

    assert task.record().error == {"type": "Boom", "message": "no luck", "retryable": False}
    with pytest.raises(Exception, match="no luck"):
        served.app.AsyncResult(task.id).get(timeout=patient(10))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"exit_code": 3}, "Contradiction"),
        ({"stdout_garbage": True, "output": 1}, None),
        ({"silent": True, "exit_code": 7}, "ChildDied"),
        ({"silent": True, "exit_code": 0}, "NoFinish"),
    ],
)
def test_exit_code_and_finish_event_must_agree(served: TestFleet, fields: dict, kind: str | None) -> None:
    task = submit(served.echo(**fields), app=served.app)

    record = task.wait(timeout=patient(30))

    if kind is None:
        assert record.state == "SUCCEEDED"
    else:
        assert (record.state, record.error["type"]) == ("FAILED", kind)


def test_cancel_while_it_waits_takes_it_out_of_the_queue(fleet: TestFleet) -> None:
    task = submit(fleet.echo(output=1), app=fleet.app)

    assert task.cancel() == "cancelled"

    assert fleet.broker.client.llen(task.record().queue) == 0
    with pytest.raises(TaskCancelled):
        task.get(timeout=patient(5))
    assert fleet.app.AsyncResult(task.id).state == "REVOKED"


def test_cancel_while_it_runs_ends_the_whole_tree_even_if_it_ignores_sigterm(fleet: TestFleet) -> None:
    worker = fleet.start_worker("w1")
    task = submit(fleet.echo(sleep_seconds=3600, children=2, ignore_sigterm=True), app=fleet.app)
    tree = _tree_of(worker, at_least=4)[1:]

    assert task.cancel() == "requested"

    assert task.wait(timeout=patient(20)).state == "CANCELLED"
    gone(tree)


def test_nothing_outlives_a_worker_that_is_killed(fleet: TestFleet) -> None:
    worker = fleet.start_worker("w1")
    submit(fleet.echo(sleep_seconds=3600, children=2, ignore_sigterm=True), app=fleet.app)
    tree = _tree_of(worker, at_least=4)

    worker.send(signal.SIGKILL)

    gone(tree)


def test_a_time_out_stops_a_silent_child(served: TestFleet) -> None:
    spec = {**served.echo(sleep_seconds=3600, silent=True), "timeout": "1s"}
    task = submit(spec, app=served.app)

    record = task.wait(timeout=patient(20))

    assert (record.state, record.error["type"]) == ("FAILED", "TimeLimitExceeded")


def test_a_killed_child_is_told_apart(served: TestFleet) -> None:
    worker = served.workers[0]
    task = submit({**served.echo(sleep_seconds=3600), "retry": {"max_attempts": 1}}, app=served.app)
    (child,) = eventually(worker.supervised, what="the child")

    child.kill()

    record = task.wait(timeout=patient(20))
    assert (record.state, record.error["type"]) == ("DEAD", "ChildKilled")
    assert "SIGKILL" in record.error["message"]


def test_an_invalid_spec_is_refused_before_anything_is_written(fleet: TestFleet) -> None:
    with pytest.raises(InvalidTemplate):
        submit({"taskType": "lora_sft", "training": {"max_steps": -1}}, app=fleet.app)
    with pytest.raises(InvalidTemplate):
        fleet.app.send_task("gpuflow.echo", kwargs={"spec": {"taskType": "nonsense"}})
    assert fleet.broker.client.keys("task:*") == []


def test_an_idempotency_key_returns_the_first_task(fleet: TestFleet) -> None:
    first = submit(fleet.echo(output=1), idempotency_key="k1", owner="ana", app=fleet.app)
    again = submit(fleet.echo(output=1), idempotency_key="k1", owner="ana", app=fleet.app)
    other = submit(fleet.echo(output=1), idempotency_key="k1", owner="bob", app=fleet.app)

    assert first.id == again.id != other.id
    assert fleet.broker.client.llen(first.record().queue) == 2


def test_a_failed_task_can_be_queued_again_under_its_id(served: TestFleet) -> None:
    task = submit(served.echo(fail={"message": "once"}), app=served.app)
    assert task.wait(timeout=patient(30)).state == "FAILED"

    assert task.retry()

    eventually(lambda: task.record().attempt == 2 and task.record().state == "FAILED")
    assert (served.results / task.id / "attempt-2").is_dir()


def test_the_child_sees_no_broker_address_and_no_token(fleet: TestFleet) -> None:
    fleet.start_worker("w1", env={"GPUFLOW_PASS_ENV": "REDIS_URL,EXTRA", "EXTRA": "yes", "HIDDEN": "x"})
    names = ["REDIS_URL", "GPUFLOW_WORKER_TOKEN", "HIDDEN", "EXTRA", "TASK_ID", "ATTEMPT", "CUDA_VISIBLE_DEVICES"]
    task = submit(fleet.echo(report_env=names), app=fleet.app)

    seen = task.get(timeout=patient(30))["environment"]

    assert seen.get("EXTRA") == "yes"
    assert seen["TASK_ID"] == task.id
    assert seen["ATTEMPT"] == "1"
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert not seen.get("REDIS_URL") and not seen.get("HIDDEN") and not seen.get("GPUFLOW_WORKER_TOKEN")


def test_a_warm_stop_finishes_what_runs_and_takes_nothing_new(fleet: TestFleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    worker = fleet.start_worker("w1", "--max-jobs", "1")
    runs = submit(fleet.echo(until_exists=str(gate), output="done"), app=fleet.app)
    eventually(lambda: runs.state == "RUNNING")
    waits = submit(fleet.echo(output=2), app=fleet.app)

    worker.send(signal.SIGTERM)
    eventually(lambda: (entry := fleet.registry.find("w1")) and entry.state == "DRAINING", what="the drain")
    gate.touch()

    assert worker.process.wait(timeout=patient(30)) == 0
    assert runs.state == "SUCCEEDED"
    assert waits.state == "QUEUED"


def test_a_cold_stop_returns_the_message_and_another_worker_runs_it(fleet: TestFleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    worker = fleet.start_worker("w1")
    task = submit(fleet.echo(until_exists=str(gate), output="done"), app=fleet.app)
    eventually(lambda: task.state == "RUNNING")
    tree = [process.pid for process in worker.children()]

    worker.send(signal.SIGQUIT)
    worker.process.wait(timeout=patient(20))

    eventually(lambda: not running(tree), what="the end of the last process, which forks the shims")
    assert not task.state.final
    gate.touch()
    fleet.start_worker("w2")
    assert task.get(timeout=patient(30))["output"] == "done"
    assert task.record().attempt == 2


def test_a_cold_stop_at_any_step_of_the_worker_ends_it(fleet: TestFleet, tmp_path: Path) -> None:
    # Given a worker whose main thread holds the locks of its pool
    hold = tmp_path / "hold"
    env = {"HOLD_SUBMIT": str(hold), "PYTHONPATH": os.pathsep.join(map(str, (HELD_SUBMIT, ROOT)))}
    worker = fleet.start_worker("w1", env=env)
    hold.touch()
    task = submit(fleet.echo(output="done"), app=fleet.app)
    eventually(hold.with_suffix(".held").exists, what="the step that holds the locks")

    worker.send(signal.SIGQUIT)
    eventually(lambda: "worker: " in worker.log(), what="the signal")
    hold.unlink()

    worker.process.wait(timeout=patient(20))
    assert not task.state.final
    fleet.start_worker("w2")
    assert task.get(timeout=patient(30))["output"] == "done"


@pytest.mark.parametrize("timeout_seconds", [0, 3600])
def test_a_cold_stop_gives_a_plain_task_back(fleet: TestFleet, tmp_path: Path, timeout_seconds: int) -> None:
    # Given a task in a thread of the worker, and Celery's soft shutdown where there is a time for it
    options = ("--include", "plain_tasks")
    soft = ("--", f"worker.soft_shutdown_timeout={timeout_seconds}")
    worker = fleet.start_worker("w1", *options, *soft)
    gate = tmp_path / "gate"
    sent = fleet.app.send_task("plain_tasks.wait_for", args=(str(gate),))
    eventually(lambda: f"wait_for[{sent.id}] received" in worker.log(), what="the task")
    eventually(lambda: fleet.broker.client.hlen(fleet.app.keys.unacked) == 1, what="its lease")

    worker.send(signal.SIGQUIT)
    if timeout_seconds:
        eventually(lambda: "worker: " in worker.log(), what="the first signal")
        assert worker.process.poll() is None
        worker.send(signal.SIGQUIT)

    worker.process.wait(timeout=patient(20))
    assert f"wait_for[{sent.id}] succeeded" not in worker.log()
    gate.touch()
    other = fleet.start_worker("w2", *options)
    eventually(lambda: f"wait_for[{sent.id}] succeeded" in other.log(), what="the other worker's turn")


#: As a container runs a worker: signals that nothing handles do not end process 1.
AS_PROCESS_1 = ("bwrap", "--die-with-parent", "--dev-bind", "/", "/", "--unshare-pid", "--as-pid-1", "--proc", "/proc")


@pytest.mark.parametrize("launcher", [(), AS_PROCESS_1], ids=["process", "process_1"])
def test_a_third_sigquit_ends_a_worker_whose_plain_task_ends_by_nothing(
    fleet: TestFleet, launcher: Sequence[str]
) -> None:
    if launcher:
        need_bubblewrap()
    worker = WorkerProcess(
        fleet.settings.redis_url or "", fleet.folder, "w1", "--include", "plain_tasks", launcher=launcher
    )
    fleet.workers.append(worker)
    eventually(lambda: "event=ready" in worker.log(), what="the worker")  # its entry has the id of its own namespace
    started = psutil.Process(worker.process.pid)
    process = started.children()[0] if launcher else started
    sent = fleet.app.send_task("plain_tasks.block")
    eventually(lambda: f"block[{sent.id}] received" in worker.log(), what="the task")
    eventually(lambda: fleet.broker.client.hlen(fleet.app.keys.unacked) == 1, what="its lease")

    for number in (1, 2, 3):
        assert worker.process.poll() is None, f"it ended before signal {number}"
        process.send_signal(signal.SIGQUIT)
        eventually(lambda n=number: worker.log().count("worker: stopping") == n, what=f"signal {number}")

    assert worker.process.wait(timeout=patient(20)) != 0


def _tree_of(worker: object, at_least: int) -> list[int]:
    """Return the worker's descendants, the process that forks its shims first."""

    def tree() -> list[int]:
        found = [process.pid for process in worker.children()]  # type: ignore[attr-defined]
        return found if len(found) > at_least else []

    return eventually(tree, what="shim, child and grandchildren running")


def test_a_handle_works_from_another_place(served: TestFleet) -> None:
    task = submit(served.echo(output=5), app=served.app)

    assert Task(task.id, served.app).get(timeout=patient(30))["output"] == 5
