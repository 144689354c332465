"""A template that is a shell, or takes what the worker knows: refused with the setting, and the worker goes on."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import Task, submit, submit_pipeline
from gpuflow.errors import NoCapableWorker, TaskFailed
from gpuflow.explaining import explain, find_records
from gpuflow.spec import parse
from gpuflow.submission_checks import problems_at_submit
from tests.fixtures.fleets import OPTIONS
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

CLOSED = {
    "GPUFLOW_ALLOW_CODE": "none",
    "GPUFLOW_ALLOW_SECRETS": "",
    "GPUFLOW_SECRET_MEANT": "for-tasks-1",
    "AWS_SECRET_ACCESS_KEY": "not-for-tasks-2",
    "HF_TOKEN": "not-for-tasks-3",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """One closed worker for all attacks."""
    made = TestFleet(tmp_path_factory.mktemp("fleet"), options=OPTIONS)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def closed(fleet: TestFleet) -> WorkerProcess:
    worker = fleet.start_worker("closed", "--max-jobs", "2", env=CLOSED)
    submit(fleet.echo(output=0), app=fleet.app).get(timeout=patient(30))
    return worker


@pytest.fixture
def worker(fleet: TestFleet, closed: WorkerProcess) -> Iterator[WorkerProcess]:
    """The worker, which goes on with other work after each attack, and has had no child for it."""
    before = closed.pid
    yield closed
    assert submit(fleet.echo(output="on"), app=fleet.app).get(timeout=patient(30))["output"] == "on"
    assert (closed.process.poll(), closed.pid) == (None, before)


def straight(fleet: TestFleet, spec: dict[str, Any]) -> Task:
    """Put a spec into Redis as the message of an echo task, past every check of a client."""
    task = submit(fleet.echo(output=1) | {"resources": {"labels": {"nobody": ""}}}, app=fleet.app)
    raw, key = fleet.broker.client.hmget(fleet.app.keys.task(task.id), "message", "list")
    front, at, rest = raw.partition('"body"')
    message = json.loads("{" + at + rest)
    args, kwargs, embed = json.loads(base64.b64decode(message["body"]))
    body = json.dumps([args, {**kwargs, "spec": spec}, embed]).encode()
    assert fleet.broker.client.lrem(key, 1, raw) == 1
    given = front + json.dumps({**message, "body": base64.b64encode(body).decode()})[1:]
    fleet.broker.client.lpush("cpu", given)
    return task


def refused(task: Task, setting: str) -> str:
    """Wait for the refusal, and return its message: it names the setting, and no attempt follows."""
    with pytest.raises(TaskFailed, match=setting):
        task.get(timeout=patient(30))
    record = task.record()
    assert (str(record.state), record.attempt) == ("FAILED", 1)
    assert record.error is not None
    assert (record.error["type"], record.error["retryable"]) == ("NotAllowed", False)
    return str(record.error["message"])


def shell(mark: Path) -> dict[str, Any]:
    return {"taskType": "command", "command": {"command": f"touch {mark}"}}


# -- code -----------------------------------------------------------------------------------------------------------


def test_a_command_waits_where_nobody_allows_it(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    task = submit(shell(tmp_path / "ran"), app=fleet.app)
    template = parse({"apiVersion": "gpuflow/v1", "kind": "Task", "spec": shell(tmp_path / "ran")})

    (answer,) = explain(task.id, app=fleet.app)
    assert answer.outcome == "cannot" and "GPUFLOW_ALLOW_CODE=command" in answer.verdict
    assert [one.kind for one in answer.workers] == ["not_allowed"]
    with pytest.raises(NoCapableWorker, match="GPUFLOW_ALLOW_CODE=command"):
        problems_at_submit(fleet.app, template, fail_fast=True)
    submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))
    assert task.state == "QUEUED" and not (tmp_path / "ran").exists()

    task.cancel()
    eventually(lambda: task.state == "CANCELLED", what="the end of the task")


def test_a_command_straight_from_redis(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    task = straight(fleet, shell(tmp_path / "ran") | {"retry": {"max_attempts": 5}})

    assert "command" in refused(task, "GPUFLOW_ALLOW_CODE=command")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "spec",
    [
        {"taskType": "inference", "model": {"source": {"identifier": "a/b", "trust_remote_code": True}}},
        {"taskType": "inference", "model": {"vllm": {"worker_cls": "evil.Worker"}}},
        {"taskType": "sft", "training": {"model_init_kwargs": '{"trust_remote_code": true}'}},
        {"taskType": "sft", "env": {"Y": "1"}, "data": {"url": "a/b", "trust_remote_code": "${env:Y}"}},
        {"taskType": "echo", "command": {}, "merge_children": [], "secrets": ["AWS_SECRET_ACCESS_KEY"]},
    ],
    ids=["remote code", "plugin", "JSON in text", "filled in by the child", "secret"],
)
def test_every_kind_straight_from_redis(fleet: TestFleet, worker: WorkerProcess, spec: dict[str, Any]) -> None:
    refused(straight(fleet, spec), "GPUFLOW_ALLOW_")


def test_variables_that_a_reference_loads(fleet: TestFleet, worker: WorkerProcess) -> None:
    content = json.dumps({"PYTHONPATH": "/tmp/evil"}).encode()
    file = fleet.results / "uploads" / "value.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    place = {"url": file.as_uri(), "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}

    task = straight(fleet, {"taskType": "echo", "env": {"$artifact": place}})

    with pytest.raises(TaskFailed, match="PYTHONPATH cannot be set by a task"):
        task.get(timeout=patient(30))
    assert task.record().attempt == 1


@pytest.mark.parametrize(
    ("env", "cause"),
    [
        ({"MODE": "1", "LD_PRELOAD": "/tmp/x"}, "LD_PRELOAD cannot be set by a task"),
        ({"pythonpath": "/tmp/x"}, "pythonpath cannot be set by a task"),
        ({"PYTHONPATH": "${env:HOME}"}, "PYTHONPATH cannot be set by a task"),
        ({"A=1": "x"}, "is no name of an environment variable"),
        ([["LD_PRELOAD", "/tmp/x"]], "env must be a mapping"),
        ("${env:HOME}", "env must be a mapping"),
    ],
    ids=["a name", "in small letters", "filled in by the child", "no name", "pairs", "a text"],
)
def test_variables_straight_from_redis(fleet: TestFleet, worker: WorkerProcess, env: Any, cause: str) -> None:
    task = straight(fleet, {"taskType": "echo", "echo": {"output": 1}, "env": env})

    with pytest.raises(TaskFailed, match=cause):
        task.get(timeout=patient(30))
    record = task.record()
    assert record.attempt == 1
    assert record.error is not None and record.error["type"] == "RefusedVariable"


@pytest.mark.parametrize(
    "second", [{"spec": {"env": "${a.result.output}"}}, {"spec": {}, "matrix": {"env": ["${a.result.output}"]}}]
)
def test_variables_that_a_stage_names(fleet: TestFleet, worker: WorkerProcess, second: dict[str, Any]) -> None:
    """Of the names nothing is known before the first stage has ended."""
    spec = fleet.echo()
    stages = [
        {"name": "a", "spec": {"echo": {"output": {"LD_PRELOAD": "/tmp/x"}}}},
        {"name": "b", "dependsOn": ["a"], **second},
    ]
    run = submit_pipeline({"apiVersion": "gpuflow/v1", "spec": {**spec, "stages": stages}}, app=fleet.app)

    eventually(lambda: run.record().state.final, within=60, what="the end of the pipeline")
    assert str(run.record().state) == "FAILED"
    assert "LD_PRELOAD cannot be set by a task" in json.dumps(run.status(), default=str)


def test_code_in_one_stage_of_a_matrix(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    template = {
        "apiVersion": "gpuflow/v1",
        "kind": "Pipeline",
        "spec": {
            "stages": [
                {
                    "name": "try",
                    "matrix": {"command.command": [f"touch {tmp_path}/a", f"touch {tmp_path}/b"]},
                    "spec": {"taskType": "command", "command": {"command": "true"}},
                }
            ]
        },
    }
    pipeline = submit_pipeline(template, app=fleet.app)

    eventually(lambda: len(find_records(fleet.app, pipeline.id)) == 2, what="the tasks of the stage")
    answers = explain(pipeline.id, app=fleet.app)
    assert answers and all("GPUFLOW_ALLOW_CODE=command" in answer.verdict for answer in answers)
    submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))
    assert not list(tmp_path.iterdir())
    pipeline.cancel()


def test_in_a_mixed_fleet_code_finds_the_open_worker(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    task = submit(shell(tmp_path / "ran"), app=fleet.app)
    submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))
    assert task.state == "QUEUED"

    opened = fleet.start_worker("open", env={"GPUFLOW_ALLOW_CODE": "command"})
    try:
        assert task.get(timeout=patient(60))["exit_code"] == 0
        assert task.record().worker == "open" and (tmp_path / "ran").exists()
        files = {"taskType": "command", "command": {"command": "true", "requirements": ["evil"]}}
        assert "project" in refused(straight(fleet, {"taskType": "command", **files}), "GPUFLOW_ALLOW_CODE=command")
    finally:
        opened.stop()


# -- secrets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PATH"])
def test_a_variable_of_the_worker_is_no_secret_of_a_task(fleet: TestFleet, worker: WorkerProcess, name: str) -> None:
    spec = {**fleet.echo(report_env=[name]), "secrets": [name], "retry": {"max_attempts": 5}}

    task = submit(spec, app=fleet.app)
    (answer,) = explain(task.id, app=fleet.app)
    (here,) = [one for one in answer.workers if one.worker == "closed"]
    assert (answer.outcome, here.kind) == ("cannot", "not_allowed") and f"GPUFLOW_SECRET_{name}" in here.text
    assert "not-for-tasks" not in str(answer.to_dict())
    submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))
    assert task.state == "QUEUED", "a worker took a task whose secret it does not give"
    task.cancel()
    message = refused(straight(fleet, spec), "GPUFLOW_ALLOW_SECRETS")

    assert f"GPUFLOW_SECRET_{name}" in message and "not-for-tasks" not in message


def test_what_nobody_named_is_not_there(fleet: TestFleet, worker: WorkerProcess) -> None:
    names = ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GPUFLOW_SECRET_MEANT", "MEANT"]

    result = submit(fleet.echo(report_env=names), app=fleet.app).get(timeout=patient(30))
    assert result["environment"] == dict.fromkeys(names)

    for name in names:
        task = submit(fleet.echo(message=f"${{env:{name}}}"), app=fleet.app)
        with pytest.raises(TaskFailed, match=f"{name} is not set for this task"):
            task.get(timeout=patient(30))


def test_a_secret_that_was_meant_for_tasks(fleet: TestFleet, worker: WorkerProcess) -> None:
    spec = {**fleet.echo(message="${env:MEANT}", report_env=["MEANT"]), "secrets": ["MEANT"]}

    result = submit(spec, app=fleet.app).get(timeout=patient(30))

    assert result["environment"] == {"MEANT": "***"}
    assert "for-tasks-1" not in worker.log()
