"""Messages that nobody can run, and data that Celery's JSON would change: no worker ends by them, and all is told."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from celery.result import AsyncResult

from gpuflow.client import submit
from gpuflow.errors import TaskFailed
from gpuflow.upkeep.reconciler import Reconciler
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

Change = Callable[[dict[str, Any]], bytes]


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One broker for all tests of this file."""
    return long_fleet


@pytest.fixture(scope="module")
def worker(fleet: TestFleet) -> WorkerProcess:
    started = fleet.start_worker("w1", "--include", "plain_tasks")
    submit(fleet.echo(output=0), app=fleet.app).get(timeout=patient(30))  # from now on the queue `cpu` is known
    return started


def changed(**parts: Any) -> Change:
    return lambda message: json.dumps({**message, **parts}).encode()


def with_body(content: bytes) -> Change:
    return lambda message: json.dumps({**message, "body": base64.b64encode(content).decode()}).encode()


def with_header(name: str, value: Any) -> Change:
    return lambda message: json.dumps({**message, "headers": {**message["headers"], name: value}}).encode()


def nested(message: dict[str, Any]) -> bytes:
    return json.dumps(message).replace('"argsrepr"', '"deep": ' + "[" * 5000 + "]" * 5000 + ', "argsrepr"').encode()


POISON: dict[str, Change] = {
    "a header of an unknown type": with_header("x", {"__type__": "x", "__value__": 1}),
    "a header of a type with a wrong value": with_header("x", {"__type__": "uuid", "__value__": 1}),
    "a body that is no base64": changed(body="%%%"),
    "a body that is a number": changed(body=7),
    "a body that is no JSON": with_body(b"{"),
    "a body with an unknown type": with_body(b'[[], {"spec": {"__type__": "x", "__value__": 1}}, {}]'),
    "a body that is no call": with_body(b'"text"'),
    "headers that are none": changed(headers=None),
    "headers that are a list": changed(headers=["id"]),
    "an eta that is none": with_header("eta", "soon"),
    "a time limit that is none": with_header("timelimit", "long"),
    "bytes that are no UTF-8": lambda message: json.dumps(message).encode().replace(b'"lang": "py"', b'"lang": "\xff"'),
    "a nest": nested,
}


def poisoned(fleet: TestFleet, change: Change) -> Any:
    """Submit a task, and put another message in the place of its own."""
    task = submit(fleet.echo(output=1) | {"resources": {"labels": {"nobody": ""}}}, app=fleet.app)
    raw, key = fleet.broker.client.hmget(fleet.app.keys.task(task.id), "message", "list")
    front, at, rest = raw.partition('"body"')
    message = json.loads("{" + at + rest)
    assert fleet.broker.client.lrem(key, 1, raw) == 1
    given = front.encode() + change(message)[1:]
    fleet.broker.client.lpush("cpu", given)
    return task


@pytest.mark.parametrize("name", POISON)
def test_a_message_that_cannot_be_run_ends_its_task_and_nobody_else(
    fleet: TestFleet, worker: WorkerProcess, name: str
) -> None:
    fleet.broker.client.delete(fleet.app.keys.unreadable)
    task = poisoned(fleet, POISON[name])

    if "headers that" not in name:  # then nobody knows of which task the message is
        with pytest.raises(TaskFailed, match=r"cannot be run.*submit the task again"):
            task.get(timeout=patient(30))
        assert task.record().error["type"] == "UnreadableMessage"
        eventually(lambda: AsyncResult(task.id, app=fleet.app).state == "FAILURE", what="the word to Celery")
    (told,) = eventually(fleet.app.ledger.unreadable, what="a message aside")
    assert told["list"] == "cpu"
    assert told["why"]
    assert task.id in told["message"]
    assert submit(fleet.echo(output=2), app=fleet.app).get(timeout=patient(30))["output"] == 2
    assert worker.process.poll() is None
    eventually(lambda: fleet.broker.client.zcard(fleet.app.keys.leases) == 0, what="the end of all leases")


@pytest.mark.usefixtures("worker")
def test_arguments_that_are_none_fail_the_task(fleet: TestFleet) -> None:
    task = poisoned(fleet, with_body(b"[5, 6, {}]"))

    with pytest.raises(TaskFailed):
        task.get(timeout=patient(30))
    eventually(lambda: AsyncResult(task.id, app=fleet.app).state == "FAILURE", what="the word to Celery")
    eventually(lambda: fleet.broker.client.zcard(fleet.app.keys.leases) == 0, what="the end of its lease")


TYPED = [
    {"__type__": "uuid", "__value__": {"hex": "0" * 32}},
    {"__type__": "nobody knows", "__value__": 1},
    {"__type__": "gpuflow.mapping", "__value__": [["a", 1]]},
    {"deep": [{"__type__": "bytes", "__value__": {"__type__": "date", "__value__": "x"}}]},
    {"__type__": "only one"},
]


@pytest.mark.usefixtures("worker")
def test_data_that_looks_like_a_type_of_celery_arrives_unchanged(fleet: TestFleet) -> None:
    spec = fleet.echo(output={"typed": TYPED}) | {"data": {"type": "list", "items": TYPED}}
    task = submit(spec, app=fleet.app)

    result = task.get(timeout=patient(30))

    assert [item["output"] for item in result["items"]] == TYPED
    assert result["typed"] == TYPED
    assert AsyncResult(task.id, app=fleet.app).get(timeout=patient(30)) == result
    assert task.record().spec["data"]["items"] == TYPED


@pytest.mark.usefixtures("worker")
def test_half_a_character_of_a_child_fails_nothing(fleet: TestFleet) -> None:
    task = submit(fleet.echo(output=1, stdout_garbage=True), app=fleet.app)

    assert task.get(timeout=patient(30))["output"] == 1
    assert task.record().attempt == 1
    assert [event.data["delta"] for event in task.events() if event.name == "text_delta"] == ["\ufffd"]


def test_one_pipeline_that_cannot_be_read_stops_no_repair(fleet: TestFleet) -> None:
    keys, client = fleet.app.keys, fleet.broker.client
    for name, fields in {
        "bad-1": {"id": "bad-1", "state": "RUNNING", "template": "{", "created_at": "1", "epoch": "1"},
        "bad-2": {"id": "bad-2", "state": "RUNNING", "template": "{}", "created_at": "soon", "epoch": "x"},
    }.items():
        client.hset(keys.pipeline(name), mapping=fields)
        client.zadd(keys.pipelines, {name: 0})
    client.lpush("cpu-nobody", b"\xff not text")
    client.sadd(keys.queues, "cpu-nobody")

    made = Reconciler(fleet.app).run()

    assert made["pipeline_settled"] == 0
    assert set(made) >= {"message_restored", "worker_offline", "queue_forgotten", "index_trimmed"}


def with_env(**env: str) -> Change:
    def change(message: dict[str, Any]) -> bytes:
        args, kwargs, embed = json.loads(base64.b64decode(message["body"]))
        body = json.dumps([args, {**kwargs, "spec": {**kwargs["spec"], "env": env}}, embed]).encode()
        return json.dumps({**message, "body": base64.b64encode(body).decode()}).encode()

    return change


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH"])
def test_a_spec_straight_from_the_broker_sets_no_variable_that_a_template_may_not(
    fleet: TestFleet, worker: WorkerProcess, name: str
) -> None:
    task = poisoned(fleet, with_env(**{name: "/tmp/x"}))

    with pytest.raises(TaskFailed, match=f"{name} cannot be set by a task"):
        task.get(timeout=patient(30))

    assert task.record().error["type"] == "RefusedVariable"
    assert task.record().attempt == 1
    submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))
