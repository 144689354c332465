"""Served models on real workers: replicas that stay loaded, move, and go.

The sessions are real processes that speak the protocol, but hold no model (tests/support/scripted_session.py).
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.audit.reading import AuditLog, Filter
from gpuflow.cli import cli
from gpuflow.client import Task, submit
from gpuflow.errors import GPUFlowError, InvalidTemplate, UnknownTask
from gpuflow.explaining import explain
from gpuflow.fleet.desired import DesiredState
from gpuflow.ledger.records import TaskRecord
from gpuflow.scaling.snapshot import read as read_fleet
from gpuflow.serving.models import ServedModel, served_spec, source_of
from gpuflow.serving.replicas import Replicas, ServedStatus
from gpuflow.serving.store import ServedModels
from tests.support.boxes import Box
from tests.support.engines import SCRIPTED, build
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

ON_CPU = {"hardware": {"gpu": {"count": 0}}}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A worker's variables: both variants of the vLLM environment are there, run by a script."""
    for variant in ("cpu", "cuda"):
        build(tmp_path / "envs", SCRIPTED, variant=variant)
    return {
        "GPUFLOW_ENV_DIR": str(tmp_path / "envs"),
        "HEARTBEAT_INTERVAL_SEC": "1",
        "GPUFLOW_STATE_DIR": str(tmp_path),
        "GPUFLOW_LEASE_SEC": "3",
        "GPUFLOW_SESSION_IDLE_SEC": "600",
    }


def model(name: str = "one", *, replicas: int = 1, owner: str = "", **fields: Any) -> ServedModel:
    spec = {
        "taskType": "inference",
        "model": {"source": source_of(f"/models/{name}")},
        "resources": ON_CPU,
        **fields,
    }
    return ServedModel(name=name, spec=served_spec(spec, owner=owner), replicas=replicas, owner=owner)


class Serving:
    """What the command does, in this process."""

    def __init__(self, fleet: TestFleet) -> None:
        self.fleet = fleet
        self.store = ServedModels(fleet.app.redis, fleet.app.keys)
        self.replicas = Replicas(fleet.app)

    def serve(self, served: ServedModel) -> str:
        answer = self.store.serve(served)
        self.replicas.reconcile(wait=True)
        return answer

    def stop(self, name: str = "one") -> bool:
        stopped = self.store.stop(name)
        self.replicas.reconcile(wait=True)
        return stopped

    def status(self, name: str = "one") -> ServedStatus:
        return next(one for one in self.replicas.statuses() if one.model.name == name)

    def warm_on(self, name: str = "one") -> list[str]:
        return sorted(str(record.worker) for record in self.status(name).warm)

    def warm(self, *workers: str, name: str = "one") -> None:
        eventually(lambda: self.warm_on(name) == sorted(workers), within=60, what=f"{name} warm on {workers}")

    def records(self, name: str = "one") -> tuple[TaskRecord, ...]:
        return self.status(name).replicas


@pytest.fixture
def serving(fleet: TestFleet) -> Serving:
    return Serving(fleet)


def ask(fleet: TestFleet, served: ServedModel, prompt: str = "echo hello") -> Task:
    call = {"taskType": "inference", "data": {"type": "list", "items": [prompt]}, "inference": {"max_tokens": 4}}
    return submit(served.call_spec(call), owner=served.owner, app=fleet.app)


def opened(worker: WorkerProcess) -> int:
    return worker.log().count("event=session_opened")


def sessions_of(worker: WorkerProcess) -> list[psutil.Process]:
    found = []
    for process in worker.children():
        try:
            if "session" in process.cmdline() and "scripted_session.py" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


# -- what is to be ----------------------------------------------------------------------------------------------


def test_a_replica_that_downloads_its_model_is_not_loaded(
    fleet: TestFleet, serving: Serving, env: dict[str, str], tmp_path: Path
) -> None:
    gate = tmp_path / "loads"
    fleet.start_worker("w1", env={**env, "LOADS_AFTER": str(gate), "GPUFLOW_PASS_ENV": "LOADS_AFTER"})
    serving.serve(model())

    def progress() -> Any:
        return next((record.progress for record in serving.records()), None)

    eventually(lambda: (progress() or {}).get("unit") == "MB", within=60, what="the progress of the download")
    assert serving.status().warm == []
    gate.touch()
    serving.warm("w1")


def test_a_served_model_answers_without_a_load_and_stop_frees_its_place(
    fleet: TestFleet, serving: Serving, env: dict[str, str]
) -> None:
    # One thread, which a replica does not take
    worker = fleet.start_worker("w1", "-c", "1", env={**env, "GPUFLOW_SESSION_IDLE_SEC": "1"})
    assert serving.serve(model()) == "served"
    serving.warm("w1")
    assert opened(worker) == 1

    answers = [ask(fleet, model(), f"echo {n}").get(timeout=patient(30)) for n in range(3)]

    assert [answer["items"][0]["output"] for answer in answers] == ["0", "1", "2"]
    assert {answer["own"] for answer in answers} == {False}
    assert opened(worker) == 1  # it idled longer than sessions do, and stayed
    (replica,) = serving.records()
    assert (replica.name, replica.task_type) == ("replica of one", "inference")

    assert serving.stop()
    eventually(lambda: fleet.state(replica.id) == "CANCELLED", what="the end of the replica")
    eventually(lambda: sessions_of(worker) == [], what="the end of its session")
    assert serving.replicas.statuses() == []
    assert not serving.stop()


def test_what_is_to_be_is_written_once_and_audited(fleet: TestFleet, serving: Serving) -> None:
    results: list[str] = []
    both = [threading.Thread(target=lambda: results.append(serving.serve(model(replicas=2)))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()

    assert sorted(results) == ["same", "served"]
    assert len(serving.records()) == 2
    assert serving.serve(model(replicas=3)) == "scaled"
    assert len(serving.records()) == 3
    assert serving.serve(model(replicas=1)) == "scaled"
    assert len(serving.records()) == 1
    with pytest.raises(GPUFlowError, match=r"served already with other options; stop it first with `gpuflow serve one"):
        serving.serve(model(engine="transformers"))
    assert serving.stop()
    entries, _ = AuditLog(fleet.app.redis, fleet.app.keys).newest(Filter(target="model:one"), 10)
    assert sorted((entry.text("action"), entry.fields.get("replicas")) for entry in entries) == [
        ("model.serve", "1"), ("model.serve", "2"), ("model.serve", "3"), ("model.stop", None),
    ]  # fmt: skip


def test_a_replica_that_somebody_cancels_comes_again_and_none_is_retried_by_hand(
    fleet: TestFleet, serving: Serving, env: dict[str, str]
) -> None:
    fleet.start_worker("w1", env=env)
    serving.serve(model())
    serving.warm("w1")
    (first,) = serving.records()

    Task(first.id, fleet.app).cancel()
    eventually(lambda: fleet.state(first.id) == "CANCELLED")
    serving.replicas.reconcile()
    serving.warm("w1")
    (second,) = serving.records()
    assert second.id != first.id
    with pytest.raises(UnknownTask, match="is a replica of a served model"):
        Task(first.id, fleet.app).retry()


def test_a_model_that_cannot_be_loaded_says_why_and_is_not_tried_without_a_pause(
    fleet: TestFleet, serving: Serving, env: dict[str, str]
) -> None:
    fleet.start_worker("w1", env=env)
    serving.serve(model("broken"))
    (replica,) = serving.records("broken")
    eventually(lambda: fleet.state(replica.id) == "FAILED")

    assert serving.replicas.reconcile() == 0

    status = serving.status("broken")
    assert (status.replicas, status.failure.count) == ((), 1)
    assert "there is no such model" in status.failure.error


def test_bad_names_are_refused() -> None:
    for bad in ("two words", "../x", "a/b/c", "", "relative/../path"):
        with pytest.raises(InvalidTemplate, match="give one such"):
            source_of(bad)
    with pytest.raises(InvalidTemplate, match="inference is of each call"):
        served_spec({"taskType": "inference", "model": {"source": source_of("/m")}, "inference": {"max_tokens": 3}})
    with pytest.raises(InvalidTemplate, match="replicaOf"):
        submit({**model().replica_spec(), "replicaOf": "one"})


# -- where it is ------------------------------------------------------------------------------------------------


def test_a_killed_worker_leaves_its_replica_to_another(fleet: TestFleet, serving: Serving, env: dict[str, str]) -> None:
    workers = {name: fleet.start_worker(name, env=env) for name in ("w1", "w2")}
    serving.serve(model())
    eventually(lambda: serving.warm_on(), what="a warm replica")
    (name,) = serving.warm_on()
    (other,) = set(workers).difference([name])

    os.kill(workers[name].pid, signal.SIGKILL)

    serving.warm(other)
    assert ask(fleet, model()).get(timeout=patient(30))["items"]
    assert opened(workers[other]) == 1


@pytest.mark.parametrize("how", ["drain", "disable"])
def test_a_worker_that_takes_nothing_more_lets_its_replica_move(
    fleet: TestFleet, serving: Serving, env: dict[str, str], how: str
) -> None:
    workers = {name: fleet.start_worker(name, env=env) for name in ("w1", "w2")}
    serving.serve(model())
    eventually(lambda: serving.warm_on(), what="a warm replica")
    (name,) = serving.warm_on()
    (other,) = set(workers).difference([name])

    if how == "drain":
        workers[name].send(signal.SIGTERM)
    else:
        fleet.registry.desire(name, DesiredState.DISABLED, reason="a test")

    serving.warm(other)
    (replica,) = serving.records()
    assert (replica.failures, replica.losses) == (0, 0)
    if how == "drain":
        assert workers[name].process.wait(timeout=patient(30)) == 0
    else:
        eventually(lambda: sessions_of(workers[name]) == [], what="the model unloaded")


def test_replicas_are_spread_and_one_too_many_waits_and_says_why(
    fleet: TestFleet, serving: Serving, env: dict[str, str]
) -> None:
    fleet.start_worker("w1", env=env)
    serving.serve(model(replicas=2))
    serving.warm("w1")
    (waiting,) = [record for record in serving.records() if record.worker is None]

    (why,) = explain(waiting.id, app=fleet.app)
    assert "keeps a replica of this model already" in why.verdict
    # Scaling sees that one more is wanted, and that the worker which has one does not idle
    seen = read_fleet(fleet.app.redis, fleet.app.keys, fleet.settings.task_topic).snapshot
    assert [(demand.queue, sum(demand.waiting.values())) for demand in seen.demands if demand.waiting] == [
        (waiting.queue, 1)
    ]
    assert [(worker.leases, worker.idle_seconds) for worker in seen.workers] == [(1, None)]

    fleet.start_worker("w2", env=env)
    serving.warm("w1", "w2")


def test_a_replica_keeps_its_gpu_and_a_second_one_gets_another_of_the_same_machine_in_time(
    fleet: TestFleet, serving: Serving, env: dict[str, str]
) -> None:
    with Box(fleet, "two", "2xA100-80GB") as box:
        worker = box.start("w1", **env, GPUFLOW_MODEL_PATIENCE_SEC="0.1")
        labels = {"labels": {"box": "two"}}
        serving.serve(model(resources={"accelerators": "A100:1", **labels}, replicas=2))
        serving.warm("w1", "w1")
        assert len(sessions_of(worker)) == 2
        (entry,) = [one for one in fleet.registry.workers() if one.id == "w1"]
        assert entry.load["idleSeconds"] is None

        # All GPUs are kept: another task waits until one is free, and nothing is evicted for it
        other = box.submit("A100:1")
        served = model(resources={"accelerators": "A100:1", **labels})
        assert ask(fleet, served).get(timeout=patient(30))["items"]
        eventually(lambda: "is busy with replica of one" in box.explained(other).verdict, what="why it waits")
        assert other.state == "QUEUED"
        serving.serve(model(resources={"accelerators": "A100:1", **labels}, replicas=1))
        assert other.get(timeout=patient(30))["gpus"]
        serving.warm("w1")
        serving.stop()
        eventually(lambda: worker.log().count("event=task_ended") >= 2, what="both replicas ended")


def test_a_session_that_dies_is_loaded_again(fleet: TestFleet, serving: Serving, env: dict[str, str]) -> None:
    worker = fleet.start_worker("w1", env=env)
    serving.serve(model())
    serving.warm("w1")
    pid = ask(fleet, model()).get(timeout=patient(30))["pid"]

    os.kill(pid, signal.SIGKILL)

    eventually(lambda: opened(worker) == 2, what="another session")
    serving.warm("w1")
    (replica,) = serving.records()
    assert (replica.attempt, replica.failures) == (2, 1)


def test_a_secret_that_changes_gets_the_replica_a_session_of_its_own(
    fleet: TestFleet, serving: Serving, env: dict[str, str], tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir(mode=0o700)
    value = secrets / "TOKEN_OF_TEST"

    def write(text: str) -> None:
        value.write_text(text)
        value.chmod(0o600)

    write("first-value")
    worker = fleet.start_worker("w1", env={**env, "GPUFLOW_SECRETS_DIR": str(secrets)})
    served = model(secrets=["TOKEN_OF_TEST"])
    serving.serve(served)
    serving.warm("w1")
    first = ask(fleet, served, "length").get(timeout=patient(30))
    write("second-value-is-longer")
    second = ask(fleet, served, "length").get(timeout=patient(30))

    lengths = [item["items"][0]["output"] for item in (first, second)]
    assert lengths == [str(len("first-value")), str(len("second-value-is-longer"))]
    serving.warm("w1")
    eventually(lambda: len(sessions_of(worker)) == 1, what="the first session ended")


def test_where_owners_are_kept_apart_a_model_is_served_for_one(
    fleet: TestFleet, serving: Serving, env: dict[str, str]
) -> None:
    """A model that brings code is loaded for one owner, as all are on workers that isolate tasks."""
    worker = fleet.start_worker("w1", env=env)
    loaded = {"source": source_of("/models/one"), "vllm": {"trust_remote_code": True}}
    serving.serve(model(model=loaded))

    def failed() -> str:
        serving.replicas.reconcile()
        return serving.status().failure.error

    assert "serve it for one: gpuflow serve MODEL --owner OWNER" in eventually(failed, what="the end of its replica")
    serving.stop()

    hers = model(model=loaded, owner="ana")
    serving.serve(hers)
    serving.warm("w1")
    assert ask(fleet, hers).get(timeout=patient(30))["items"]
    assert opened(worker) == 1
    # The same model for another owner is another session, and closes none
    call = {"taskType": "inference", "data": {"type": "list", "items": ["echo x"]}}
    his = submit({**model(model=loaded).call_spec(call)}, owner="bo", app=fleet.app)
    assert his.get(timeout=patient(30))["items"]
    assert opened(worker) == 2
    (replica,) = serving.records()
    assert (replica.attempt, replica.owner) == (1, "ana")
    assert serving.warm_on() == ["w1"]


def test_the_command_waits_until_the_model_is_loaded_and_says_when_it_cannot_be(
    fleet: TestFleet, serving: Serving, env: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fleet.start_worker("w1", env=env)
    monkeypatch.setenv("REDIS_URL", fleet.broker.url)

    def command(*arguments: str) -> object:
        with pytest.raises(SystemExit) as ended:
            cli.main(args=["serve", *arguments], prog_name="gpuflow")
        return ended.value.code

    assert command("/models/one", "--name", "one", "--wait") == 0
    assert serving.warm_on() == ["w1"]
    assert command("/models/broken", "--name", "broken", "--wait") == 1
    assert "broken: there is no such model" in capsys.readouterr().err
    assert command("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[1:]] == ["0/1", "1/1"]
