"""Tasks, pipelines, workers and queues over HTTP: a real gateway, broker and worker."""

from __future__ import annotations

import concurrent.futures
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient

TASKS, PIPELINES = "/api/v1/tasks", "/api/v1/pipelines"


@pytest.fixture(scope="module")
def front(served: TestFleet) -> Iterator[Gateway]:
    """A gateway before a fleet with one worker."""
    with Gateway(served.folder, env={"REDIS_URL": served.broker.url}) as started:
        yield started


@pytest.fixture
def http(front: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=front.url, headers=front.headers, timeout=patient(30)) as made:
        yield made


def echo(**fields: Any) -> dict[str, Any]:
    return {"taskType": "echo", "echo": fields}


def pipeline(name: str, *messages: str, **metadata: Any) -> dict[str, Any]:
    stages = [{"name": f"s{number}", "spec": echo(message=text)} for number, text in enumerate(messages)]
    return {"apiVersion": "gpuflow/v1", "metadata": {"name": name, **metadata}, "spec": {"stages": stages}}


def problem(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return str(answer.json()["type"]).removeprefix("urn:gpuflow:problem:")


def ended(http: httpx.Client, url: str) -> dict[str, Any]:
    def final() -> dict[str, Any] | None:
        shown = http.get(url).json()
        return shown if shown["state"] in ("SUCCEEDED", "FAILED", "CANCELLED", "DEAD") else None

    return eventually(final, what=f"the end of {url}")


def submit(http: httpx.Client, body: Any, to: str = TASKS, **options: Any) -> dict[str, Any]:
    answer = http.post(to, json=body, **options)
    assert answer.status_code == 201, answer.text
    return answer.json()


# -- one task ----------------------------------------------------------------------------------------------------


def test_a_task_is_submitted_shown_and_ends_with_its_result(http: httpx.Client) -> None:
    told = submit(http, echo(message="hello"))
    shown = ended(http, told["url"])

    assert told["kind"] == "task"
    assert told["warnings"] == []
    assert (shown["state"], shown["result"]["message"]) == ("SUCCEEDED", "hello")
    assert [entry["outcome"] for entry in shown["attempts"]] == ["succeeded"]
    assert "hello" not in json.dumps(http.get(TASKS).json()), "a list holds no results"
    log = http.get(f"{told['url']}/logs")
    assert (log.status_code, log.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert "state SUCCEEDED" in log.text


def test_yaml_is_read_as_curl_sends_it(http: httpx.Client) -> None:
    text = "taskType: echo\necho: {message: from yaml}\n"
    for kind in ("application/yaml", "application/x-www-form-urlencoded"):
        answer = http.post(TASKS, content=text, headers={"Content-Type": kind})
        assert answer.status_code == 201, answer.text
        assert ended(http, answer.json()["url"])["result"]["message"] == "from yaml"


def test_every_mistake_is_told_at_once_and_nothing_is_written(http: httpx.Client, served: TestFleet) -> None:
    before = served.app.redis.zcard(served.app.keys.tasks)
    answer = http.post(TASKS, json={"taskType": "echo", "echo": {"steps": "many", "nonsense": 1}, "timeout": -1})

    assert (answer.status_code, problem(answer)) == (422, "invalid-template")
    assert {error["path"] for error in answer.json()["errors"]} == {"echo.steps", "echo.nonsense", "timeout"}
    assert all(error["message"] for error in answer.json()["errors"])
    assert served.app.redis.zcard(served.app.keys.tasks) == before


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (b"", 400, "bad-request"),
        (b"\xff\xfe", 400, "bad-request"),
        (b"[1]", 422, "invalid-template"),
        (b'"quickstart"', 422, "invalid-template"),
        (b'"/etc/passwd"', 422, "invalid-template"),
        (b"{", 422, "invalid-template"),
        (b"[" * 100_000, 422, "invalid-template"),
        (b'{"taskType": "echo", "echo": {"message": "\\ud800"}, "x": 1}', 422, "invalid-template"),
        (b'{"a": "' + b"x" * (11 << 20) + b'"}', 413, "too-large"),
    ],
)
def test_what_is_no_template_is_refused(http: httpx.Client, content: bytes, status: int, kind: str) -> None:
    answer = http.post(TASKS, content=content, headers={"Content-Type": "application/json"})

    assert (answer.status_code, problem(answer)) == (status, kind)
    assert http.get("/healthz").status_code == 200


def test_local_files_of_the_gateway_cannot_be_named(http: httpx.Client, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"text": "secret"}\n')
    for spec in (
        {"taskType": "inference", "model": {"source": {"identifier": "m"}}, "data": {"upload": str(secret)}},
        {"taskType": "command", "command": {"command": "cat x", "project": str(tmp_path)}},
    ):
        answer = http.post(TASKS, json=spec)
        assert (answer.status_code, problem(answer)) == (422, "invalid-template")
        (error,) = answer.json()["errors"]
        assert "/api/v1/results/" in error["message"]
    answer = http.post(TASKS, json={**echo(message="x"), "target": "local"})
    assert answer.json()["errors"][0]["path"] == "spec.target"


def test_a_key_runs_its_work_once_and_takes_no_other(http: httpx.Client, served: TestFleet) -> None:
    key = {"Idempotency-Key": str(uuid.uuid4())}
    big = echo(message="x" * (2 << 20))
    for body, other in ((echo(message="once"), echo(message="other")), (big, echo(message="y" * (2 << 20)))):
        key = {"Idempotency-Key": str(uuid.uuid4())}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            ids = {one["id"] for one in pool.map(lambda _, b=body, k=key: submit(http, b, headers=k), range(8))}
        assert len(ids) == 1
        task = ids.pop()
        ended(http, f"{TASKS}/{task}")
        assert http.post(TASKS, json=body, headers=key).status_code == 201
        refused = http.post(TASKS, json=other, headers=key)
        assert (refused.status_code, problem(refused)) == (409, "key-in-use")
    first = submit(http, pipeline("keyed", "a", "b"), PIPELINES, headers=key)
    assert first["id"] != task, "tasks and pipelines have keys of their own"
    assert http.get(f"{TASKS}/{first['id']}").status_code == 404
    assert submit(http, pipeline("keyed", "a", "b"), PIPELINES, headers=key)["id"] == first["id"]
    assert problem(http.post(PIPELINES, json=pipeline("keyed", "a", "c"), headers=key)) == "key-in-use"
    for changed in ({"condition": {"value": "${s0.result.output}", "exists": True}}, {"matrix": {"priority": [1, 2]}}):
        other = pipeline("keyed", "a", "b")
        other["spec"]["stages"][1] |= changed
        assert problem(http.post(PIPELINES, json=other, headers=key)) == "key-in-use"
    bad = http.post(TASKS, json=echo(), headers={"Idempotency-Key": "two words"})
    assert (bad.status_code, problem(bad)) == (400, "bad-key")


def test_a_cancel_stops_a_task_and_a_retry_runs_it_again(http: httpx.Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    told = submit(http, echo(message="late", until_exists=str(gate)))
    eventually(lambda: http.get(told["url"]).json()["state"] == "RUNNING", what="a running task")
    assert problem(http.post(f"{told['url']}/retry")) == "nothing-to-retry"

    answer = http.delete(told["url"])
    assert (answer.status_code, answer.json()["outcome"]) == (202, "requested")
    assert ended(http, told["url"])["state"] == "CANCELLED"
    assert http.delete(told["url"]).json()["outcome"] == "final"

    gate.touch()
    assert http.post(f"{told['url']}/retry").status_code == 202
    assert ended(http, told["url"])["result"]["message"] == "late"


def test_it_says_why_a_task_waits(http: httpx.Client) -> None:
    told = submit(http, {**echo(message="x"), "resources": {"labels": {"nowhere": "at-all"}}})
    (explained,) = http.get(f"{told['url']}/explain").json()["explanations"]

    assert "w1" in json.dumps(explained["workers"])
    assert told["warnings"]
    refused = http.post(
        TASKS, json={**echo(message="x"), "resources": {"labels": {"nowhere": "x"}}}, params={"fail_fast": "true"}
    )
    assert (refused.status_code, problem(refused)) == (409, "no-capable-worker")
    assert http.delete(told["url"]).json()["outcome"] == "cancelled"


def test_a_repeat_whose_first_answer_was_lost_is_not_refused(http: httpx.Client) -> None:
    nowhere = {**echo(message="x"), "resources": {"labels": {"nowhere": "x"}}}
    for url, body in ((TASKS, nowhere), (PIPELINES, nowhere)):
        key = {"Idempotency-Key": str(uuid.uuid4())}
        fast = {"fail_fast": "true"}
        assert problem(http.post(url, json=body, headers=key, params=fast)) == "no-capable-worker"
        first = submit(http, body, url, headers=key)  # as a worker that could run it is there, and then is not
        assert submit(http, body, url, headers=key, params=fast)["id"] == first["id"]
        http.delete(first["url"])


@pytest.mark.parametrize("id", ["no-such", "x:attempts", "..", "a%2Fb", "%00", "\u00fc", "a" * 300])
def test_an_id_that_names_nothing_is_unknown(http: httpx.Client, id: str) -> None:
    told = submit(http, echo(message="one"))
    for kind in (TASKS, PIPELINES, "/api/workers"):
        assert http.get(f"{kind}/{id}").status_code == 404
    for answer in (
        http.delete(f"{TASKS}/{told['id']}:attempts"),
        http.get(f"{TASKS}/{told['id']}:attempts/events"),
        http.post(f"{PIPELINES}/{told['id']}/resume"),
    ):
        assert (answer.status_code, problem(answer)) == (404, "unknown")


# -- lists -------------------------------------------------------------------------------------------------------


def test_pages_hold_each_task_once_whatever_comes_meanwhile(http: httpx.Client) -> None:
    owner = f"ana-{uuid.uuid4()}"
    body = {"apiVersion": "gpuflow/v1", "metadata": {"name": "listed", "owner": owner}, "spec": echo(message="x")}
    ids = [submit(http, body)["id"] for _ in range(7)]
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = http.get(TASKS, params={"owner": owner, "limit": 3, **({"cursor": cursor} if cursor else {})}).json()
        found += [task["id"] for task in page["tasks"]]
        cursor = page["next"]
        if cursor is None:
            break
        submit(http, body)

    assert found == ids[::-1]
    assert http.get(TASKS, params={"owner": owner, "name": "other"}).json() == {"tasks": [], "next": None}
    for params in ({"limit": 0}, {"limit": "x"}, {"state": "ODD"}, {"cursor": "W10"}, {"cursor": "\u00fc"}):
        assert http.get(TASKS, params=params).status_code == 400


def test_tasks_are_found_by_state(http: httpx.Client) -> None:
    told = submit(http, echo(fail={"message": "no"}))
    assert ended(http, told["url"])["error"]["message"] == "no"

    failed = http.get(TASKS, params={"state": "FAILED", "limit": 1000}).json()["tasks"]
    assert told["id"] in {task["id"] for task in failed}
    assert {task["state"] for task in failed} == {"FAILED"}


# -- pipelines and the fleet ---------------------------------------------------------------------------------------


def test_a_pipeline_runs_is_cancelled_and_resumed(http: httpx.Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = pipeline("held", "one", "two", labels={"team": "nlp"})
    body["spec"]["stages"][1]["spec"]["echo"]["until_exists"] = str(gate)
    told = submit(http, body, PIPELINES)
    eventually(lambda: http.get(told["url"]).json()["stages"][1]["state"] == "DISPATCHED", what="the second stage")
    assert http.delete(told["url"]).json()["outcome"] == "cancelled"
    assert ended(http, told["url"])["state"] == "CANCELLED"
    gate.touch()
    assert http.post(f"{told['url']}/resume").json()["outcome"] == "resumed"
    shown = ended(http, told["url"])
    assert [stage["state"] for stage in shown["stages"]] == ["SUCCEEDED", "SUCCEEDED"]
    for label, there in (("team=nlp", True), ("team", True), ("team=x", False)):
        listed = http.get(PIPELINES, params={"label": label, "name": "held"}).json()["pipelines"]
        assert (told["id"] in {one["id"] for one in listed}) is there


def test_a_configuration_is_submitted_as_the_seeds_do(http: httpx.Client) -> None:
    ask = {"config_name": "quickstart", "target": "worker", "worker_labels": {"gpu_type": "a100*"}}
    told = http.post("/api/queue/submit", json=ask)
    assert told.status_code == 201, told.text
    shown = http.get(told.json()["url"]).json()
    assert shown["name"]
    assert http.delete(told.json()["url"]).json()["outcome"] == "cancelled"
    for body, status in (
        ({"config_name": "../../etc/passwd"}, 404),
        ({"config_name": "quickstart", "target": "local"}, 422),
        ({"config_name": "quickstart", "worker_labels": {"a": 1}, "more": 1}, 422),
        ({}, 422),
        ([], 422),
    ):
        assert http.post("/api/queue/submit", json=body).status_code == status
    assert len(http.post("/api/queue/submit", json={"worker_labels": {"a": 1}, "more": 1}).json()["errors"]) == 3


def test_workers_and_queues_are_listed(http: httpx.Client) -> None:
    submit(http, echo(message="x"))
    (worker,) = http.get("/api/workers").json()["workers"]
    assert worker["id"] == "w1"
    alone = http.get("/api/workers/w1").json()
    for one in (worker, alone):
        assert one["capability"].pop("disk_free_mib") > 0  # of another heartbeat, it is another number
    assert alone["capability"] == worker["capability"]
    rows = {row["name"]: row for row in http.get("/api/queues").json()["queues"]}
    assert rows["cpu"]["workers"] == ["w1"]


def test_methods_and_heads_are_answered_right(http: httpx.Client) -> None:
    told = submit(http, echo(message="x"))
    for path in (TASKS, told["url"], told["events"], PIPELINES, "/api/workers", "/api/queues", "/healthz"):
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b""), path
    put = http.put(TASKS)
    assert put.status_code == 405
    assert put.headers["Allow"]
    assert http.head(f"{TASKS}/no-such").status_code == 404


def test_without_the_token_nothing_is_told(front: Gateway) -> None:
    reads = ("/openapi.json", TASKS, "/api/workers", f"{TASKS}/x/events")
    writes = (("POST", TASKS), ("POST", "/api/queue/submit"), ("DELETE", f"{PIPELINES}/x"))
    for method, path in (*(("GET", path) for path in reads), *writes):
        answer = httpx.request(method, f"{front.url}{path}", timeout=patient(30))
        assert (answer.status_code, problem(answer)) == (401, "no-token")


def test_a_broker_that_is_away_is_told_and_the_gateway_goes_on(fleet: TestFleet) -> None:
    with (
        Gateway(fleet.folder, env={"REDIS_URL": fleet.broker.url}) as gateway,
        httpx.Client(base_url=gateway.url, headers=gateway.headers, timeout=patient(30)) as http,
    ):
        assert http.get(TASKS).status_code == 200
        fleet.broker.kill()
        for answer in (http.get(TASKS), http.post(TASKS, json=echo(message="x")), http.get("/api/workers")):
            assert (answer.status_code, problem(answer)) == (503, "broker-away")
            assert answer.headers["Retry-After"]
        fleet.broker.restart()
        eventually(lambda: http.get(TASKS).status_code == 200, what="an answer after the broker's return")
        assert submit(http, echo(message="again"))["id"]


def test_several_gateways_show_the_same(front: Gateway, served: TestFleet, tmp_path: Path) -> None:
    with (
        Gateway(tmp_path, env={"REDIS_URL": served.broker.url}) as second,
        httpx.Client(base_url=front.url, headers=front.headers, timeout=patient(30)) as one,
        httpx.Client(base_url=second.url, headers=second.headers, timeout=patient(30)) as two,
    ):
        key = {"Idempotency-Key": str(uuid.uuid4())}
        first = submit(one, echo(message="both"), headers=key)
        assert submit(two, echo(message="both"), headers=key)["id"] == first["id"]
        ended(two, first["url"])
        assert one.get(first["url"]).json() == two.get(first["url"]).json()
        cursor = one.get(TASKS, params={"limit": 1}).json()["next"]
        assert two.get(TASKS, params={"limit": 1, "cursor": cursor}).status_code == 200
