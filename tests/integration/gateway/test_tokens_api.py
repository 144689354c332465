"""Tokens at the gateway: what each role may do on each route, whose work it sees, and how soon a cut is felt."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gpuflow.client import submit, submit_pipeline
from gpuflow.gateway.rights import ROUTES, needed
from gpuflow.tokens.rights import Right, Role
from gpuflow.tokens.store import TokenStore
from gpuflow.tokens.workers import WorkerTokens
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient

TASKS, PIPELINES, RESULTS = "/api/v1/tasks", "/api/v1/pipelines", "/api/v1/results"
#: A revoked token opens nothing after so many seconds, and its streams end.
FELT_WITHIN = 8.0


@pytest.fixture(scope="module")
def front(served: TestFleet) -> Iterator[Gateway]:
    env = {"REDIS_URL": served.broker.url, "GPUFLOW_SERVED_MODELS": "tiny=tiny-random"}
    with Gateway(served.folder, env=env, root=served.results) as started:
        yield started


@pytest.fixture(scope="module")
def store(served: TestFleet) -> TokenStore:
    return TokenStore(served.app.redis, served.app.keys)


@pytest.fixture(scope="module")
def headers(store: TokenStore, front: Gateway, served: TestFleet) -> dict[str, dict[str, str]]:
    """Return what each kind of caller sends."""
    made = {"fleet": front.headers, "nobody": {}}
    for role in Role:
        _, token = store.create_user_token(role, owner="ana")
        made[role] = {"Authorization": f"Bearer {token.text}"}
    made["ben"] = {"Authorization": f"Bearer {store.create_user_token(Role.SUBMITTER, owner='ben')[1].text}"}
    made["auditor"] = {"Authorization": f"Bearer {store.create_user_token(Role.VIEWER, owner=None)[1].text}"}
    workers = WorkerTokens(served.app.redis, store, address=served.broker.url, queues=[])
    made["w1"] = {"X-Worker-Token": workers.create("w1", labels={}, only_fleet=True).token.text}
    made["w2"] = {"X-Worker-Token": workers.create("w2", labels={}, only_fleet=True).token.text}
    return made


@pytest.fixture(scope="module")
def http(front: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=front.url, timeout=patient(30)) as made:
        yield made


def kind_of(answer: httpx.Response) -> str:
    return str(answer.json()["type"]).removeprefix("urn:gpuflow:problem:")


def echo(**fields: Any) -> dict[str, Any]:
    return {"taskType": "echo", "echo": fields}


def template(owner: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "gpuflow/v1", "metadata": {"name": "t", "owner": owner}, "spec": echo(**fields)}


# -- roles ---------------------------------------------------------------------------------------------------------


def test_every_route_of_the_gateway_has_a_right(http: httpx.Client, front: Gateway) -> None:
    document = http.get("/openapi.json", headers=front.headers).json()
    there = {
        (
            method.upper(),
            path.replace("files/{name}", "files/{name:path}").replace("models/{name}", "models/{name:path}"),
        )
        for path, methods in document["paths"].items()
        for method in methods
        if path != "/healthz"
    }
    assert there - ROUTES.keys() == set()
    assert needed("GET", "/not/listed") is Right.ADMIN


#: Routes that change nothing for the ids in them, and what a body needs.
_CALLS = [
    (method, route.replace("{id}", "nothing").replace("{task_id}", "nothing").replace("{name:path}", "nothing"), right)
    for (method, route), right in ROUTES.items()
    if right is not Right.FILES
]


@pytest.mark.parametrize(("method", "path", "right"), _CALLS)
def test_who_may_call_a_route(
    http: httpx.Client, headers: dict[str, dict[str, str]], method: str, path: str, right: Right
) -> None:
    allowed = {
        Right.ANY: {*Role, "ben", "auditor", "w1", "w2", "fleet"},
        Right.READ: {*Role, "ben", "auditor", "fleet"},
        Right.READ_ALL: {Role.OPERATOR, Role.ADMIN, "auditor", "fleet"},
        Right.SUBMIT: {Role.SUBMITTER, Role.OPERATOR, Role.ADMIN, "ben", "fleet"},
        Right.STEER: {Role.OPERATOR, Role.ADMIN, "fleet"},
        Right.ADMIN: {Role.ADMIN, "fleet"},
    }[right]
    for who, sent in headers.items():
        answer = http.request(method, path, headers=sent, content=b"{" if method == "POST" else None)
        told = (method, path, who, answer.status_code)
        if who == "nobody":
            assert answer.status_code == 401, told
        elif who in allowed:
            assert answer.status_code not in (401, 403, 500), told
        else:
            assert answer.status_code == 403, told


# -- owners ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(http: httpx.Client, headers: dict[str, dict[str, str]]) -> str:
    """A task of ana that has ended, with files."""
    made = http.post(TASKS, json=echo(output="hers"), headers=headers[Role.SUBMITTER])
    assert made.status_code == 201, made.text
    url = made.json()["url"]
    eventually(lambda: http.get(url, headers=headers["fleet"]).json()["state"] == "SUCCEEDED", what="her task")
    return str(made.json()["id"])


@pytest.fixture(scope="module")
def pipeline(served: TestFleet) -> str:
    stages = [{"name": "one", "spec": served.echo(output=1)}]
    run = submit_pipeline(
        {"apiVersion": "gpuflow/v1", "metadata": {"name": "p", "owner": "ana"}, "spec": {"stages": stages}},
        app=served.app,
    )
    run.wait(timeout=patient(60))
    return run.id


def file_of(http: httpx.Client, headers: dict[str, dict[str, str]], task: str) -> str:
    found = http.get(f"{RESULTS}/{task}/files", headers=headers["fleet"]).json()["files"]
    return next(one["name"] for one in found if one["name"].endswith("responses.json"))


def test_what_an_owner_has_is_404_for_another_on_every_route(
    http: httpx.Client, headers: dict[str, dict[str, str]], task: str, pipeline: str
) -> None:
    name = file_of(http, headers, task)
    calls = [
        ("GET", f"{TASKS}/{task}"), ("DELETE", f"{TASKS}/{task}"), ("POST", f"{TASKS}/{task}/retry"),
        ("GET", f"{TASKS}/{task}/explain"), ("GET", f"{TASKS}/{task}/logs"), ("GET", f"{TASKS}/{task}/events"),
        ("GET", f"{PIPELINES}/{pipeline}"), ("DELETE", f"{PIPELINES}/{pipeline}"),
        ("POST", f"{PIPELINES}/{pipeline}/resume"), ("GET", f"{PIPELINES}/{pipeline}/events"),
        ("GET", f"{RESULTS}/{task}/files/{name}"), ("HEAD", f"{RESULTS}/{task}/files/{name}"),
        ("DELETE", f"{RESULTS}/{task}/files/{name}"), ("HEAD", f"{TASKS}/{task}"),
    ]  # fmt: skip
    before = http.get(f"{TASKS}/{task}", headers=headers["fleet"]).json()
    for method, path in calls:
        hers = http.request(method, path, headers=headers["ben"])
        none = http.request(
            method, path.replace(task, "missing-id").replace(pipeline, "missing-id"), headers=headers["ben"]
        )
        assert (hers.status_code, none.status_code) == (404, 404), (method, path)
        if method != "HEAD":
            assert hers.text.replace(task, "ID").replace(pipeline, "ID") == none.text.replace("missing-id", "ID")
    assert http.get(f"{TASKS}/{task}", headers=headers["fleet"]).json() == before
    assert http.get(f"{RESULTS}/{task}/files", headers=headers["ben"]).json()["files"] == []


def test_lists_hold_the_callers_own_alone(
    http: httpx.Client, headers: dict[str, dict[str, str]], task: str, pipeline: str
) -> None:
    for who, sees in (("ben", False), (Role.VIEWER, True), (Role.SUBMITTER, True), ("auditor", True), ("fleet", True)):
        for path, id in ((f"{TASKS}?limit=1000", task), (f"{TASKS}?owner=ana", task), (PIPELINES, pipeline)):
            assert (id in http.get(path, headers=headers[who]).text) is sees, (who, path)
        assert (task in http.get(RESULTS, headers=headers[who]).text) is sees, who
        assert (task in http.get(f"{RESULTS}?prefix={task}", headers=headers[who]).text) is sees, who


def test_a_running_task_is_not_told_to_others(
    http: httpx.Client, headers: dict[str, dict[str, str]], served: TestFleet
) -> None:
    gate = served.folder / "told"
    running = submit(template("ana", output="r", until_exists=str(gate)), app=served.app)
    try:
        eventually(lambda: running.state == "RUNNING")
        eventually(lambda: running.id in http.get("/api/workers", headers=headers["fleet"]).text)
        assert running.id not in http.get("/api/workers", headers=headers["ben"]).text
        assert running.id not in http.get("/api/workers/w1", headers=headers["ben"]).text
        assert running.id in http.get("/api/workers/w1", headers=headers[Role.VIEWER]).text
        mine = http.post(
            TASKS, json={**echo(output=1), "resources": {"labels": {"no": "such"}}}, headers=headers["ben"]
        )
        told = http.get(f"{TASKS}/{mine.json()['id']}/explain", headers=headers["ben"])
        assert told.status_code == 200
        assert running.id not in told.text
    finally:
        gate.touch()
    running.wait(timeout=patient(30))


@pytest.mark.parametrize(
    ("who", "named", "status", "owner"),
    [
        (Role.SUBMITTER, "", 201, "ana"), (Role.SUBMITTER, "ana", 201, "ana"), (Role.SUBMITTER, "ben", 403, None),
        ("ben", "ana", 403, None), (Role.OPERATOR, "", 201, "ana"), (Role.OPERATOR, "ben", 201, "ben"),
        ("fleet", "ben", 201, "ben"), ("fleet", "", 201, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to", [TASKS, PIPELINES])
def test_as_whom_work_is_submitted(
    http: httpx.Client,
    headers: dict[str, dict[str, str]],
    who: str,
    named: str,
    status: int,
    owner: str | None,
    to: str,
) -> None:
    before = len(http.get(f"{to}?limit=1000", headers=headers["fleet"]).json()[to.rsplit("/", 1)[1]])
    answer = http.post(to, json=template(named, output=1), headers=headers[who])

    assert answer.status_code == status, answer.text
    if status == 403:
        assert kind_of(answer) == "foreign-owner"
        after = len(http.get(f"{to}?limit=1000", headers=headers["fleet"]).json()[to.rsplit("/", 1)[1]])
        assert after == before
    else:
        shown = http.get(answer.json()["url"], headers=headers["fleet"]).json()
        assert (shown.get("owner") or None) == owner


def test_a_key_of_one_owner_is_not_that_of_another(http: httpx.Client, headers: dict[str, dict[str, str]]) -> None:
    sent = {"Idempotency-Key": "same"}
    first = http.post(TASKS, json=echo(output=1), headers={**headers[Role.SUBMITTER], **sent})
    again = http.post(TASKS, json=echo(output=1), headers={**headers[Role.SUBMITTER], **sent})
    other = http.post(TASKS, json=echo(output=1), headers={**headers["ben"], **sent})

    assert first.json()["id"] == again.json()["id"] != other.json()["id"]


def test_shipped_pipelines_and_calls_of_v1_are_owned_too(
    http: httpx.Client, headers: dict[str, dict[str, str]], served: TestFleet
) -> None:
    queued = http.post(
        "/api/queue/submit", json={"config_name": "quickstart", "worker_labels": {"no": "such"}}, headers=headers["ben"]
    )
    assert queued.status_code == 201, queued.text
    assert http.get(queued.json()["url"], headers=headers["ben"]).json()["owner"] == "ben"
    assert http.get(queued.json()["url"], headers=headers[Role.SUBMITTER]).status_code == 404
    http.delete(queued.json()["url"], headers=headers["ben"])
    call = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=call, headers=headers["ben"]) as stream:
        assert stream.status_code == 200
        listed = http.get(f"{TASKS}?limit=1000", headers=headers["ben"]).json()["tasks"]
        assert {one["owner"] for one in listed if one["taskType"] == "inference" and "pipeline" not in one} == {"ben"}


# -- files ----------------------------------------------------------------------------------------------------------


def digest_header(content: bytes) -> dict[str, str]:
    return {"Repr-Digest": f"sha-256=:{b64encode(hashlib.sha256(content).digest()).decode()}:"}


def test_who_writes_uploads_proves_their_digest(http: httpx.Client, headers: dict[str, dict[str, str]]) -> None:
    content, other = b"mine", b"not mine"
    url = f"{RESULTS}/uploads/files/{hashlib.sha256(content).hexdigest()}/x.txt"
    for who in (Role.SUBMITTER, "w1"):
        refused = [
            http.post(url, content=other, headers={**headers[who], **digest_header(other)}),
            http.post(url, content=other, headers=headers[who]),
            http.post(url, content=other, headers={**headers[who], **digest_header(content)}),
            http.post(f"{RESULTS}/uploads/files/x", content=other, headers={**headers[who], **digest_header(other)}),
            http.post(f"{RESULTS}/uploads/files", files={"file": ("a", b"x")}, headers=headers[who]),
            http.post(f"{RESULTS}/anything/files/x", content=other, headers={**headers[who], **digest_header(other)}),
        ]
        assert [one.status_code for one in refused] == [403, 403, 422, 403, 403, 403], who
        assert http.post(url, content=content, headers={**headers[who], **digest_header(content)}).status_code < 300
    assert (
        http.post(url, content=content, headers={**headers[Role.VIEWER], **digest_header(content)}).status_code == 403
    )
    assert http.get(url, headers=headers["ben"]).content == content, "whoever knows the digest"
    assert http.delete(url, headers=headers["ben"]).status_code == 404
    assert url.rsplit("/", 2)[1] not in http.get(f"{RESULTS}?prefix=uploads", headers=headers["ben"]).text


def test_a_worker_writes_the_attempts_that_it_holds_alone(
    http: httpx.Client, headers: dict[str, dict[str, str]], served: TestFleet, task: str
) -> None:
    gate = served.folder / "held"
    running = submit(template("ana", output="r", until_exists=str(gate)), app=served.app)
    eventually(lambda: running.state == "RUNNING")
    eventually(lambda: running.id in http.get("/api/workers/w1", headers=headers["fleet"]).text)
    place = f"{RESULTS}/{running.id}/files"
    name = file_of(http, headers, task)
    try:
        wrote = {
            (who, at): http.post(f"{place}/{at}", content=b"x", headers=headers[who]).status_code
            for who in ("w1", "w2", Role.SUBMITTER, "ben")
            for at in ("attempt-1/x.txt", "attempt-2/x.txt", "x.txt")
        }
        assert {key for key, status in wrote.items() if status < 300} == {("w1", "attempt-1/x.txt")}
        assert http.get(f"{place}/attempt-1/x.txt", headers=headers["w1"]).content == b"x"
        assert http.get(f"{RESULTS}/{task}/files/{name}", headers=headers["w1"]).status_code == 200, "of her tasks"
        assert http.get(f"{place}/attempt-1/x.txt", headers=headers["w2"]).status_code == 404
        assert http.get(f"{RESULTS}/{task}/files/{name}", headers=headers["w2"]).status_code == 404
    finally:
        gate.touch()
    running.wait(timeout=patient(30))
    late = http.post(f"{place}/attempt-1/x.txt", content=b"late", headers=headers["w1"])
    assert late.status_code == 403, "a replay after the end"
    assert http.get(f"{place}/attempt-1/x.txt", headers=headers["fleet"]).content == b"x"


# -- a cut ----------------------------------------------------------------------------------------------------------


def test_streams_end_and_requests_are_refused_soon_after_a_token_is_revoked(
    http: httpx.Client, headers: dict[str, dict[str, str]], front: Gateway, served: TestFleet, store: TokenStore
) -> None:
    gate = served.folder / "cut"
    record, token = store.create_user_token(Role.SUBMITTER, owner="ana")
    mine = {"Authorization": f"Bearer {token.text}"}
    running = submit(template("ana", output="r", until_exists=str(gate)), app=served.app)
    text: list[str] = []
    ended: list[float] = []

    def read() -> None:
        with httpx.stream(
            "GET", f"{front.url}{TASKS}/{running.id}/events", headers=mine, timeout=patient(60)
        ) as stream:
            for part in stream.iter_text():
                text.append(part)
        ended.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: running.state == "RUNNING")
    eventually(lambda: store.find(record.id) is not None and http.get(TASKS, headers=mine).status_code == 200)
    eventually(lambda: text, what="the first events of the stream")
    revoked = http.delete(f"/api/admin/tokens/{record.id}", headers=headers[Role.ADMIN])
    began = time.monotonic()
    reader.join(patient(30))
    gate.touch()

    assert revoked.status_code == 204
    assert ended and ended[0] - began < patient(FELT_WITHIN)
    assert "not valid any more" in "".join(text)
    assert "event: end" not in "".join(text)
    eventually(lambda: http.get(TASKS, headers=mine).status_code == 401, within=FELT_WITHIN, what="its refusal")
    assert http.delete(f"/api/admin/tokens/{record.id}", headers=headers[Role.ADMIN]).status_code == 404
    running.wait(timeout=patient(30))
    assert token.text not in front.log
    assert "Traceback" not in front.log


# -- administration -------------------------------------------------------------------------------------------------


def test_an_admin_makes_lists_and_removes_tokens(http: httpx.Client, headers: dict[str, dict[str, str]]) -> None:
    admin = headers[Role.ADMIN]
    made = http.post("/api/admin/tokens", json={"role": "viewer", "owner": "cem", "label": "x"}, headers=admin)
    ask = {"name": "w9", "labels": {"a": "b"}}
    shared = http.post("/api/admin/workers", json=ask, headers=admin)
    worker = http.post("/api/admin/workers", json={**ask, "onlyFleet": True}, headers=admin)
    again = http.post("/api/admin/workers", json={"name": "w9", "onlyFleet": True}, headers=admin)
    rotated = http.post("/api/admin/workers/w9/token", headers=admin)
    listed = http.get("/api/admin/workers", headers=admin).text + http.get("/api/admin/tokens", headers=admin).text

    assert (made.status_code, worker.status_code, again.status_code, rotated.status_code) == (201, 201, 409, 201)
    assert (shared.status_code, "onlyFleet" in shared.json()["detail"]) == (409, True)
    assert worker.json()["warnings"] == []
    assert made.headers["cache-control"] == "no-store"
    assert made.json()["token"].startswith(f"ut_{made.json()['id']}_")
    assert worker.json()["token"] != rotated.json()["token"]
    assert rotated.json()["token"] in rotated.json()["redisUrl"]
    for secret in (made.json()["token"], worker.json()["token"], rotated.json()["token"]):
        assert secret not in listed
    assert "w9" in listed
    assert http.get(TASKS, headers={"Authorization": f"Bearer {made.json()['token']}"}).status_code == 200
    assert http.delete("/api/admin/workers/w9", headers=headers["fleet"]).status_code == 204
    assert http.delete("/api/admin/workers/w9", headers=admin).status_code == 404
    assert http.delete("/api/admin/workers/w1", headers=admin).status_code == 409, "it works"
    bad = {"name": "w8", "queues": ["b:access:token:1"], "onlyFleet": True}
    assert http.post("/api/admin/workers", json=bad, headers=admin).status_code == 422
    entries = http.get("/api/admin/audit", params={"target": "worker:w9"}, headers=admin).json()["entries"]
    told = [(entry["action"], entry["actor"]) for entry in entries]
    who = f"token:{admin['Authorization'].split('_')[1]} 127.0.0.1"
    assert told == [("worker.delete", "gateway:127.0.0.1"), ("worker.rotate", who), ("worker.create", who)]
    for body in ({"role": "viewer"}, {"role": "king", "owner": "a"}, {"role": "viewer", "owner": ""}, {"x": 1},
                 {"role": "viewer", "owner": "a", "allOwners": True}):  # fmt: skip
        assert http.post("/api/admin/tokens", json=body, headers=admin).status_code == 422, body


def test_an_operator_steers_workers(http: httpx.Client, headers: dict[str, dict[str, str]], served: TestFleet) -> None:
    operator = headers[Role.OPERATOR]
    off = http.post("/api/admin/workers/w1/disable", headers=operator)
    eventually(lambda: not http.get("/api/workers/w1", headers=operator).json()["enabled"])
    on = http.post("/api/admin/workers/w1/enable", headers=operator)
    eventually(lambda: http.get("/api/workers/w1", headers=operator).json()["enabled"])

    assert (off.json(), on.json()) == (
        {"id": "w1", "desired": "disabled"}, {"id": "w1", "desired": "enabled"}
    )  # fmt: skip
    assert http.post("/api/admin/workers/nobody/drain", headers=operator).status_code == 404
    entries = http.get("/api/admin/audit", params={"target": "*w1"}, headers=headers["fleet"]).json()["entries"]
    steered = [one["action"] for one in entries if one["action"] != "worker.register"]
    assert steered[:2] == ["worker.enable", "worker.disable"], "one entry each"
    assert not {"worker.enabled", "worker.disabled"} & set(steered)


@pytest.mark.parametrize(
    "sent",
    [
        {"Authorization": "Bearer ut_0123456789abcdef_" + "a" * 43},
        {"X-Worker-Token": "wt_0123456789abcdef_" + "a" * 43},
        {"Authorization": "Bearer ut_*_" + "a" * 43},
        {"Authorization": "Bearer " + "x" * 5000},
        {"Authorization": "Basic dXQ6eA=="},
        {"Authorization": "Bearer {ut}", "swap": "id"},
        {"Authorization": "Bearer {ut} {ut}"},
        {"Authorization": "Bearer {ut}x"},
        {"X-Worker-Token": "{ut}"},
    ],
)
def test_a_token_that_is_none_opens_nothing(
    http: httpx.Client, headers: dict[str, dict[str, str]], sent: dict[str, str]
) -> None:
    own = headers[Role.ADMIN]["Authorization"].removeprefix("Bearer ")
    swapped = own.replace(own.split("_")[1], headers["ben"]["Authorization"].split("_")[1])
    token = swapped if sent.get("swap") else own
    given = {name: value.replace("{ut}", token) for name, value in sent.items() if name != "swap"}

    assert http.get(TASKS, headers=given).status_code == 401
    assert own not in json.dumps(http.get(TASKS, headers=given).json())
