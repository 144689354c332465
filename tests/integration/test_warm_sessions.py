"""Warm sessions of real workers: one load for many tasks, places, eviction, and ends that harm nobody else.

The sessions are real processes that speak the protocol, but hold no model (tests/support/scripted_session.py).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.client import Task, submit
from gpuflow.errors import TaskDead, TaskFailed
from gpuflow.fleet.desired import DesiredState
from tests.support.boxes import Box
from tests.support.engines import SCRIPTED, build
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A worker's variables: both variants of the vLLM environment are there, run by a script."""
    for variant in ("cpu", "cuda"):
        build(tmp_path / "envs", SCRIPTED, variant=variant)
    return {
        "GPUFLOW_ENV_DIR": str(tmp_path / "envs"),
        "HEARTBEAT_INTERVAL_SEC": "1",
        "GPUFLOW_STATE_DIR": str(tmp_path),
    }


@pytest.fixture
def one(fleet: TestFleet, env: dict[str, str]) -> WorkerProcess:
    """A worker without GPUs."""
    return fleet.start_worker("w1", env=env)


def ask(prompt: str, model: str = "/models/one", **fields: Any) -> dict[str, Any]:
    return {
        "taskType": "inference",
        "model": {"source": {"type": "local", "identifier": model}},
        "data": {"type": "list", "items": [prompt]},
        "retry": {"backoff_seconds": 0},
        "resources": {"hardware": {"gpu": {"count": 0}}},
        **fields,
    }


def opened(worker: WorkerProcess) -> int:
    return worker.log().count("event=session_opened")


def sessions_of(worker: WorkerProcess) -> list[psutil.Process]:
    """The session processes of a worker."""
    found = []
    for process in worker.children():
        try:
            if "session" in process.cmdline() and "scripted_session.py" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def over(task: Task) -> bool:
    return task.state in ("SUCCEEDED", "FAILED", "CANCELLED", "DEAD")


def running(task: Task) -> Task:
    eventually(lambda: task.state == "RUNNING", what=f"{task.id} runs")
    return task


# -- one load ---------------------------------------------------------------------------------------------------


def test_many_tasks_of_one_model_load_it_once(fleet: TestFleet, one: WorkerProcess) -> None:
    first = [submit(ask(f"echo {number}"), app=fleet.app).get(timeout=patient(30)) for number in range(3)]
    many = [submit(ask(f"echo {number}"), app=fleet.app) for number in range(30)]

    later = [task.get(timeout=patient(60)) for task in many]

    assert [result["items"][0]["output"] for result in later] == [str(number) for number in range(30)]
    assert {result["pid"] for result in first + later} == {first[0]["pid"]}
    assert {result["engine"] for result in later} == {"vllm"}
    assert opened(one) == 1


def test_those_that_come_while_it_loads_wait_for_the_same_session(
    fleet: TestFleet, env: dict[str, str], tmp_path: Path
) -> None:
    gate = tmp_path / "loaded"
    worker = fleet.start_worker("w1", env={**env, "LOADS_AFTER": str(gate), "GPUFLOW_PASS_ENV": "LOADS_AFTER"})
    tasks = [submit(ask(f"echo {number}"), app=fleet.app) for number in range(4)]
    for task in tasks:
        running(task)

    gate.touch()

    assert {task.get(timeout=patient(30))["pid"] for task in tasks} == {tasks[0].get()["pid"]}
    assert opened(worker) == 1


def test_what_an_engine_is_loaded_with_tells_sessions_apart(fleet: TestFleet, one: WorkerProcess) -> None:
    base = submit(ask("echo a"), app=fleet.app).get(timeout=patient(30))["pid"]
    same = [
        submit(ask("echo b", inference={"temperature": 0.5, "max_tokens": 3}), app=fleet.app).get(timeout=patient(30)),
        submit(ask("echo c", timeout=60, priority=9), app=fleet.app).get(timeout=patient(30)),
    ]
    model = {"source": {"type": "local", "identifier": "/models/one"}, "vllm": {"max_model_len": 128}}
    other = [
        submit(ask("echo d", model="/models/two"), app=fleet.app).get(timeout=patient(30)),
        submit({**ask("echo e"), "model": model}, app=fleet.app).get(timeout=patient(30)),
        submit(ask("echo f", env={"TOKEN_OF_TEST": "mine"}), app=fleet.app).get(timeout=patient(30)),
    ]

    assert {result["pid"] for result in same} == {base}
    assert len({base, *(result["pid"] for result in other)}) == 4
    assert [result["token"] for result in other] == ["", "", "mine"]


def test_without_idle_time_each_task_has_a_child_of_its_own(fleet: TestFleet, env: dict[str, str]) -> None:
    worker = fleet.start_worker("w1", env={**env, "GPUFLOW_SESSION_IDLE_SEC": "0"})

    results = [submit(ask("echo a"), app=fleet.app).get(timeout=patient(30)) for _ in range(2)]

    assert [result["own"] for result in results] == [True, True]
    assert opened(worker) == 0


# -- ends -------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_the_others_and_the_session(
    fleet: TestFleet, one: WorkerProcess, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    cancelled, other = (running(submit(ask(f"wait {gate}"), app=fleet.app)) for _ in range(2))

    cancelled.cancel()
    eventually(lambda: cancelled.state == "CANCELLED")
    gate.touch()

    result = other.get(timeout=patient(30))
    assert submit(ask("echo x"), app=fleet.app).get(timeout=patient(30))["pid"] == result["pid"]
    assert opened(one) == 1


def test_a_session_that_is_killed_costs_its_requests_one_attempt_each_and_others_nothing(
    fleet: TestFleet, one: WorkerProcess, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    pid = submit(ask("echo a"), app=fleet.app).get(timeout=patient(30))["pid"]
    apart = running(submit(ask(f"wait {gate}", model="/models/two"), app=fleet.app))
    hit = [running(submit(ask(f"wait {gate}"), app=fleet.app)) for _ in range(3)]

    os.kill(pid, signal.SIGKILL)
    eventually(lambda: all(task.record().preemptions == 1 for task in hit), what="the first attempts to end")
    gate.touch()

    fresh = {task.get(timeout=patient(30))["pid"] for task in hit}
    assert len(fresh) == 1
    assert fresh != {pid}
    assert [(task.record().state, task.record().attempt, task.record().failures) for task in hit] == [
        ("SUCCEEDED", 2, 0)
    ] * 3
    assert apart.get(timeout=patient(30))["items"]
    assert apart.record().attempt == 1
    assert [entry.error["type"] for entry in fleet.app.ledger.attempts(hit[0].id) if entry.error] == ["EngineDied"]


def test_a_request_that_kills_its_engine_takes_no_other_with_it(
    fleet: TestFleet, one: WorkerProcess, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    retry = {"retry": {"max_attempts": 2, "backoff_seconds": 0}}
    good = [running(submit(ask(f"wait {gate}") | retry, app=fleet.app)) for _ in range(2)]
    culprit = submit(ask("die") | retry, app=fleet.app)
    eventually(lambda: all(task.record().preemptions for task in [*good, culprit]), what="the first engine dead")
    gate.touch()

    with pytest.raises(TaskDead, match="has gone"):
        culprit.get(timeout=patient(60))

    assert [task.get(timeout=patient(60))["items"][0]["index"] for task in good] == [0, 0]
    # One that waited for the culprit in the same session goes back once more, and that counts for nothing either.
    assert [task.record().failures for task in good] == [0, 0]
    outcomes = [entry.outcome for entry in fleet.app.ledger.attempts(culprit.id)]
    assert outcomes[0] == "preempted"
    assert [outcome for outcome in outcomes if outcome != "preempted"] == ["failed", "dead"]


def test_a_frozen_session_does_not_hold_a_cancel(fleet: TestFleet, one: WorkerProcess) -> None:
    task = running(submit(ask("freeze"), app=fleet.app))

    task.cancel()

    eventually(lambda: task.state == "CANCELLED", within=20)


def test_a_model_that_cannot_be_loaded_fails_its_tasks_with_the_cause(fleet: TestFleet, one: WorkerProcess) -> None:
    with pytest.raises(TaskFailed, match="there is no such model"):
        submit(ask("echo a", model="/models/broken"), app=fleet.app).get(timeout=patient(30))

    assert submit(ask("echo a"), app=fleet.app).get(timeout=patient(30))["items"]
    eventually(lambda: len(sessions_of(one)) == 1, what="one session")


def test_idle_sessions_are_closed_and_nothing_is_left(fleet: TestFleet, env: dict[str, str]) -> None:
    worker = fleet.start_worker("w1", env={**env, "GPUFLOW_SESSION_IDLE_SEC": "1"})

    submit(ask("echo a"), app=fleet.app).get(timeout=patient(30))

    eventually(lambda: "event=session_ended" in worker.log(), what="its end")
    assert sessions_of(worker) == []


def test_a_disabled_worker_answers_what_it_has_and_unloads_its_models(
    fleet: TestFleet, one: WorkerProcess, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    submit(ask("echo a", model="/models/other"), app=fleet.app).get(timeout=patient(30))
    task = running(submit(ask(f"wait {gate}"), app=fleet.app))
    assert len(sessions_of(one)) == 2

    assert fleet.registry.desire("w1", DesiredState.DISABLED, reason="a test") == "written"
    eventually(lambda: len(sessions_of(one)) == 1, what="the idle model unloaded")
    waits = submit(ask("echo b"), app=fleet.app)
    gate.touch()

    assert task.get(timeout=patient(30))["items"]
    eventually(lambda: sessions_of(one) == [], what="the other one unloaded when it idles")
    assert waits.state == "QUEUED"
    assert fleet.registry.desire("w1", DesiredState.ENABLED) == "written"
    assert waits.get(timeout=patient(30))["items"]


def test_a_drained_worker_answers_what_it_has_and_leaves_no_session(
    fleet: TestFleet, one: WorkerProcess, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    task = running(submit(ask(f"wait {gate}"), app=fleet.app))
    (session,) = sessions_of(one)

    one.send(signal.SIGTERM)
    eventually(lambda: "event=draining" in one.log())
    gate.touch()

    assert task.get(timeout=patient(30))["items"]
    assert one.process.wait(timeout=patient(30)) == 0
    assert not session.is_running()


def test_sessions_die_with_their_worker(fleet: TestFleet, one: WorkerProcess) -> None:
    submit(ask("echo a"), app=fleet.app).get(timeout=patient(30))
    (session,) = sessions_of(one)

    one.process.kill()

    eventually(lambda: not session.is_running(), what="the end of the session")


# -- GPUs -------------------------------------------------------------------------------------------------------


def gpu_ask(prompt: str, model: str) -> dict[str, Any]:
    fields = ask(prompt, model)
    del fields["resources"]
    return fields


def test_two_models_take_turns_on_one_gpu(fleet: TestFleet, env: dict[str, str]) -> None:
    with Box(fleet, "small", "1xA100-80GB") as box:
        worker = box.start("w1", **env)
        tasks = []
        for number in range(20):
            tasks.append(box.submit("A100:1", **gpu_ask(f"echo {number}", f"/models/{number % 2}")))
            assert tasks[-1].get(timeout=patient(60))["items"][0]["output"] == str(number)

        assert {task.get()["gpus"] for task in tasks} == {tasks[0].get()["gpus"]}
        assert opened(worker) == 20
        assert worker.log().count("event=session_evicted") == 19
        eventually(lambda: len(sessions_of(worker)) == 1, what="one session")
        # what another task needs is there as soon as the last session has gone
        assert box.submit("A100:1").get(timeout=patient(30))["gpus"]
        assert sessions_of(worker) == []


def test_an_idle_session_leaves_for_a_task_of_another_worker_of_its_machine(
    fleet: TestFleet, env: dict[str, str]
) -> None:
    with Box(fleet, "shared", "1xA100-80GB") as box:
        warm = box.start("warm", "--executors", "inference", **env)
        box.submit("A100:1", **gpu_ask("echo a", "/models/one")).get(timeout=patient(30))
        box.start("other", "--executors", "echo", **env)

        assert box.submit("A100:1").get(timeout=patient(30))["gpus"]

        assert "another worker of this machine" in warm.log()


def test_requests_to_a_warm_model_need_no_free_gpu(fleet: TestFleet, env: dict[str, str], tmp_path: Path) -> None:
    gate = tmp_path / "go"
    with Box(fleet, "small", "1xA100-80GB") as box:
        worker = box.start("w1", "--max-jobs", "1", **env)
        busy = running(box.submit("A100:1", **gpu_ask(f"wait {gate}", "/models/one")))
        waiting = box.submit("A100:1")  # the only GPU is taken

        quick = [box.submit("A100:1", **gpu_ask(f"echo {n}", "/models/one")).get(timeout=patient(30)) for n in range(3)]

        assert waiting.state == "QUEUED"
        gate.touch()
        assert {result["pid"] for result in quick} == {busy.get(timeout=patient(30))["pid"]}
        assert waiting.get(timeout=patient(30))["gpus"]
        assert opened(worker) == 1


def test_a_stream_of_requests_to_one_model_does_not_keep_another_out_for_ever(
    fleet: TestFleet, env: dict[str, str]
) -> None:
    with Box(fleet, "small", "1xA100-80GB") as box:
        worker = box.start("w1", GPUFLOW_MODEL_PATIENCE_SEC="0.05", **env)

        def one() -> Task:
            return box.submit("A100:1", **gpu_ask("sleep 0.3", "/models/one"))

        stream = [one() for _ in range(10)]
        stream[0].get(timeout=patient(30))
        other = box.submit("A100:1", **gpu_ask("echo other", "/models/two"))
        deadline = time.monotonic() + patient(30)
        while not over(other) and time.monotonic() < deadline:
            stream = [task for task in stream if not over(task)]
            stream += [one() for _ in range(10 - len(stream))]

        assert over(other), "it still waits while the first model is asked without a pause"
        assert other.get()["items"][0]["output"] == "other"
        for task in stream:
            task.get(timeout=patient(30))  # the first model comes back for those that it had to leave
        assert opened(worker) >= 2


def test_a_secret_that_has_changed_gets_a_session_of_its_own_and_costs_no_attempt(
    fleet: TestFleet, env: dict[str, str], tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir(mode=0o700)
    value = secrets / "TOKEN_OF_TEST"

    def write(text: str) -> None:
        value.write_text(text)
        value.chmod(0o600)

    write("first-value")
    worker = fleet.start_worker("w1", env={**env, "GPUFLOW_SECRETS_DIR": str(secrets)})

    def one() -> Task:
        return submit(ask("length", secrets=["TOKEN_OF_TEST"], retry={"max_attempts": 1}), app=fleet.app)

    first = one().get(timeout=patient(30))
    write("second-value-is-longer")
    second = one().get(timeout=patient(30))

    lengths = [item["items"][0]["output"] for item in (first, second)]
    assert lengths == [str(len("first-value")), str(len("second-value-is-longer"))]
    assert opened(worker) == 2


def test_tasks_of_a_plain_queue_have_a_child_of_their_own(fleet: TestFleet, env: dict[str, str]) -> None:
    worker = fleet.start_worker("w1", "-Q", "team.inference", env=env)

    spec = {key: part for key, part in ask("echo plain").items() if key != "resources"}
    found = fleet.app.send_task("gpuflow.inference", args=[spec], queue="team.inference").get(timeout=patient(30))

    assert (found["items"][0]["output"], found["own"]) == ("plain", True)
    assert opened(worker) == 0
