"""Functions of a team over HTTP: nobody calls one that the operator of the gateway does not name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gpuflow import submit, submit_pipeline
from gpuflow.gateway.bodies import refuse_function_of
from gpuflow.gateway.problems import Problem
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient

TASKS, PIPELINES = "/api/v1/tasks", "/api/v1/pipelines"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """A broker, a store for large values, and a worker with the functions."""
    folder = tmp_path_factory.mktemp("functions")
    made = TestFleet(folder, env={"GPUFLOW_STORE_URL": (folder / "store").as_uri()})
    try:
        made.start_worker("w1", "--include", "team_stages")
        yield made
    finally:
        made.close()


def client_of(fleet: TestFleet, allowed: str) -> Iterator[httpx.Client]:
    env = {"REDIS_URL": fleet.broker.url, "GPUFLOW_GATEWAY_FUNCTIONS": allowed, **fleet.env}
    with Gateway(fleet.folder, env=env) as started:
        made = httpx.Client(base_url=started.url, headers=started.headers, timeout=patient(30))
        with made:
            yield made


@pytest.fixture(scope="module")
def http(fleet: TestFleet) -> Iterator[httpx.Client]:
    yield from client_of(fleet, "team_stages.w*,team_stages.same")


def call(name: str, *args: Any) -> dict[str, Any]:
    return {"taskType": "function", "function": {"name": name, "args": list(args)}}


def pipeline(*specs: dict[str, Any]) -> dict[str, Any]:
    stages = [{"name": f"s{number}", "spec": spec} for number, spec in enumerate(specs)]
    return {"apiVersion": "gpuflow/v1", "spec": {"stages": stages}}


def refused(answer: httpx.Response) -> str:
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:gpuflow:problem:function-not-allowed"), answer.text
    return str(answer.json()["detail"])


def ended(http: httpx.Client, url: str) -> Any:
    return eventually(lambda: (shown := http.get(url).json())["state"] == "SUCCEEDED" and shown, what="its end")


def test_a_function_that_is_named_is_called(http: httpx.Client, fleet: TestFleet) -> None:
    task = http.post(TASKS, json=call("team_stages.words", "a b"))
    run = http.post(PIPELINES, json=pipeline(call("team_stages.words", "a b"), call("team_stages.same", "${s0.value}")))

    assert ended(http, task.json()["url"])["result"]["value"] == ["a", "b"]
    ended(http, run.json()["url"])
    stage = fleet.app.pipelines.get(run.json()["id"]).stage("s1")
    assert (fleet.app.ledger.get(stage.tasks[0]).result or {})["value"] == ["a", "b"]


def test_another_one_is_refused_and_nothing_is_written(http: httpx.Client, fleet: TestFleet) -> None:
    before = (len(fleet.app.pipelines.recent(1000)), fleet.app.redis.zcard(fleet.app.keys.tasks))

    told = refused(http.post(TASKS, json=call("team_stages.given")))
    assert "team_stages.given" in told and "GPUFLOW_GATEWAY_FUNCTIONS" in told and "team_stages.w*" not in told
    refused(http.post(PIPELINES, json=pipeline(call("team_stages.words", "a"), call("team_stages.given"))))
    refused(http.post(PIPELINES, json=call("team_stages.given")))
    for name in ("gpuflow.command", "${s0.value}"):
        body = pipeline(call("team_stages.words", "team_stages.given"), call(name))
        assert http.post(PIPELINES, json=body).status_code == 422
    assert (len(fleet.app.pipelines.recent(1000)), fleet.app.redis.zcard(fleet.app.keys.tasks)) == before


def test_a_gateway_that_names_none_lets_nobody_call_one(fleet: TestFleet) -> None:
    for http in client_of(fleet, ""):
        refused(http.post(TASKS, json=call("team_stages.words", "a b")))


@pytest.mark.parametrize("text", ["a b", "$${a.b}", "large " * 300_000])
@pytest.mark.parametrize("route", [TASKS, PIPELINES])
def test_a_key_runs_its_work_once(http: httpx.Client, fleet: TestFleet, route: str, text: str) -> None:
    key = {"Idempotency-Key": f"key-{len(text)}"}
    first = http.post(route, json=call("team_stages.same", text), headers=key)
    assert first.status_code == 201, first.text
    ended(http, first.json()["url"])

    again = http.post(route, json=call("team_stages.same", text), headers=key)
    other = http.post(route, json=call("team_stages.same", f"{text}!"), headers=key)

    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
    assert other.status_code == 409
    if route == TASKS:
        assert fleet.app.ledger.get(first.json()["id"]).result == {"value": text.replace("$$", "$")}


def by_celery(fleet: TestFleet, name: str) -> str:
    """Return the id of a call by plain Celery that has ended, as nobody has what it asks for."""
    sent = fleet.app.send_task(name, ("a b",), resources="A100:1")
    assert fleet.app.cancel_task(sent.id) == "cancelled"
    return str(sent.id)


def test_what_runs_again_is_asked_for_as_at_the_first_time(http: httpx.Client, fleet: TestFleet) -> None:
    task = submit(call("team_stages.fails", "no"), app=fleet.app)
    run = submit_pipeline(pipeline(call("team_stages.fails", "no")), app=fleet.app)
    eventually(lambda: (fleet.state(task.id), run.state) == ("FAILED", "FAILED"), what="their ends")
    other = by_celery(fleet, "team_stages.fails")

    assert "team_stages.fails" in refused(http.post(f"{TASKS}/{task.id}/retry"))
    refused(http.post(f"{TASKS}/{run['s0'].tasks[0].id}/retry"))
    refused(http.post(f"{TASKS}/{other}/retry"))
    refused(http.post(f"{PIPELINES}/{run.id}/resume"))
    assert (fleet.state(task.id), run.state, fleet.state(other)) == ("FAILED", "FAILED", "CANCELLED")


def test_what_the_gateway_allows_runs_again(http: httpx.Client, fleet: TestFleet) -> None:
    wrong = call("team_stages.words", 1)
    task, run = (http.post(route, json=wrong).json()["url"] for route in (TASKS, PIPELINES))
    for url in (task, run):
        eventually(lambda url=url: http.get(url).json()["state"] == "FAILED", what="its end")

    answers = [http.post(f"{task}/retry"), http.post(f"{run}/resume")]
    answers.append(http.post(f"{TASKS}/{by_celery(fleet, 'team_stages.words')}/retry"))

    assert [answer.status_code for answer in answers] == [202, 202, 202], [answer.text for answer in answers]


def test_a_merged_call_of_plain_celery_is_one_of_its_function() -> None:
    record = TaskRecord(id="a", state=TaskState.FAILED, task_type="my_team.jobs.embed")

    refuse_function_of(record, ["my_team.*"])
    refuse_function_of(TaskRecord(id="b", state=TaskState.FAILED, task_type="echo", spec={"taskType": "echo"}), [])
    with pytest.raises(Problem, match="my_team"):
        refuse_function_of(record, ["team_stages.*"])
