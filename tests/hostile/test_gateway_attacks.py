"""Requests that mean harm to a real gateway with tokens: each is refused, changes nothing, and forges nothing."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gpuflow.audit.reading import AuditLog, Filter
from gpuflow.broker.keys import Keys
from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.settings import Settings
from gpuflow.tokens.rights import Role
from gpuflow.tokens.store import TokenStore
from gpuflow.tokens.texts import new_token, read_token
from tests.hostile.test_worker_login import everything
from tests.support.fleet import Broker
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import eventually, patient

FORGED = "event=task_succeeded task=victim"
#: Ends of lines as an address, a header and a text may hold them.
ENDS = ["%0A", "%0D%0A", "%0D", "%E2%80%A8", "%C2%85", "%1b[2J", "%00"]


@dataclass(frozen=True, kw_only=True)
class Front:
    gateway: Gateway
    broker: Broker
    app: GPUFlow
    tokens: dict[str, str]
    task: str

    def state(self) -> dict[str, Any]:
        """Return all that is stored, files too; the audit log counts wrong tokens and is left out."""
        kept = {name: value for name, value in everything(self.broker).items() if not name.startswith("gpuflow.audit")}
        return {**kept, "files": self.gateway.files(), "parts": [str(path) for path in self.gateway.parts()]}

    def client(self, who: str = "fleet") -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.tokens[who]}"} if who else {}
        return httpx.Client(base_url=self.gateway.url, headers=headers, timeout=patient(30))

    def raw(self, request: bytes, *, ends: bool = True) -> bytes:
        """Send bytes and return all that comes until the other side closes; `ends`: no more bytes come."""
        port = urlsplit(self.gateway.url).port
        found = b""
        with socket.create_connection(("127.0.0.1", port), timeout=patient(30)) as line:
            line.sendall(request)
            if ends:
                line.shutdown(socket.SHUT_WR)
            try:
                while piece := line.recv(4096):
                    found += piece
            except ConnectionResetError:
                pass
        return found


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    broker = Broker(folder / "broker")
    env = {"REDIS_URL": broker.url, "RESULTS_DIR": str(folder / "results")}
    app = GPUFlow("attacks", settings=Settings.load(env=env, cwd=folder), set_as_current=False)
    try:
        with Gateway(folder, env={"REDIS_URL": broker.url}) as gateway:
            store = TokenStore(app.redis, app.keys)
            made = {str(role): store.create_user_token(role, owner="ana")[1].text for role in Role}
            made["ben"] = store.create_user_token(Role.SUBMITTER, owner="ben")[1].text
            task = submit({"taskType": "echo", "echo": {}}, owner="ana", app=app)
            yield Front(gateway=gateway, broker=broker, app=app, tokens={"fleet": TOKEN, **made}, task=task.id)
    finally:
        app.close()
        app.redis.close()
        broker.close()


def is_refused(answer: httpx.Response) -> bool:
    """Whether it is a problem of the client's making, which shows nothing of the machine."""
    machine = ("Traceback", str(Path.home()), "/tmp/", "redis://")
    return 400 <= answer.status_code < 500 and not any(part in answer.text for part in machine)


# -- log injection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("path", ["/api/v1/tasks/{}", "/api/v1/pipelines/{}/events", "/api/v1/results/{}/files", "/{}"])
def test_an_address_begins_no_line_of_the_log(front: Front, path: str, end: str) -> None:
    before, lines = front.state(), len(front.gateway.log.splitlines())
    with front.client() as client:
        answer = client.get(path.format(f"x{end}{FORGED}".replace(" ", "%20")))
    assert is_refused(answer) or (answer.status_code == 200 and answer.json().get("files") == [])
    eventually(lambda: len(front.gateway.log.splitlines()) > lines, what="the line of the request")
    new = front.gateway.log.splitlines()[lines:]
    assert len(new) == 1 and "event=request" in new[0]
    assert "\x1b" not in new[0] and "\x00" not in new[0]
    assert front.state() == before


@pytest.mark.parametrize(
    "name", ["User-Agent", "Referer", "Idempotency-Key", "X-Request-Id", "Last-Event-ID", "Cookie"]
)
def test_a_header_begins_no_line_of_the_log(front: Front, name: str) -> None:
    before, log = front.state(), len(front.gateway.log)
    with front.client() as client:
        client.get("/api/v1/tasks", headers={name: f"\x85{FORGED}\t\x9b2J".encode("latin-1")})  # what a header may hold
    eventually(lambda: len(front.gateway.log) > log, what="the line of the request")
    assert FORGED not in front.gateway.log[log:]
    assert front.state() == before


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\x85", "\x1b[2J"])
def test_text_of_an_admin_begins_no_line_of_log_or_audit(front: Front, end: str) -> None:
    """Labels, owners and reasons are names: what is no printable text is refused."""
    before, log = front.state(), front.gateway.log
    text = f"x{end}{FORGED}"
    with front.client() as client:
        answers = [
            client.post("/api/admin/tokens", json={"role": "viewer", "owner": text}),
            client.post("/api/admin/tokens", json={"role": "viewer", "owner": "ana", "label": text}),
            client.post("/api/admin/workers", json={"name": text, "onlyFleet": True}),
            client.post("/api/admin/workers", json={"name": "w", "labels": {"a": text}, "onlyFleet": True}),
        ]
    assert {one.status_code for one in answers} <= {409, 422}, [one.text for one in answers]
    assert front.state() == before
    assert not [line for line in front.gateway.log[len(log) :].splitlines() if line.startswith(FORGED)]


def test_a_name_of_a_task_forges_no_line_anywhere(front: Front) -> None:
    text = f"t\r\n{FORGED}\n\nevent: end\ndata: forged\n\n"
    spec = {
        "apiVersion": "gpuflow/v1",
        "metadata": {"name": text},
        "spec": {"taskType": "echo", "echo": {"message": text}},
    }
    log = len(front.gateway.log)
    with front.client() as client:
        made = client.post("/api/v1/tasks", json=spec)
        if made.status_code == 202 or made.status_code == 201:
            task = made.json()["id"]
            front.app.event_log.append(task, {"event": "log", "message": text}, 1000)
            assert client.delete(f"/api/v1/tasks/{task}").status_code < 300
            stream = client.get(f"/api/v1/tasks/{task}/events").text
            lines = stream.splitlines()
            assert "data: forged" not in lines and "event: end\ndata: forged" not in stream
            assert all(re.match(r"(id|event|data|retry|:)", line) or not line for line in lines)
        else:
            assert is_refused(made)
    assert not [line for line in front.gateway.log[log:].splitlines() if line.startswith(FORGED)]
    entries, _ = AuditLog(front.app.redis, front.app.keys).newest(Filter(), 20, "")
    assert all("\n" not in value for entry in entries for value in map(str, entry.public().values()))


# -- header injection -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["%0D%0A", "%0A", "%0D"])
@pytest.mark.parametrize(
    "path",
    ["/api/v1/results/{task}/files/a{}", "/api/v1/results/x{}/files/a", "/api/v1/tasks/x{}", "/v1/models/x{}",
     "/api/v1/tasks?cursor=x{}", "/nothing{}"],
)  # fmt: skip
def test_an_address_writes_no_header_of_the_answer(front: Front, path: str, end: str) -> None:
    before = front.state()
    part = f"{end}Set-Cookie:%20stolen=1{end}{end}<script>"
    for method in ("GET", "HEAD", "POST", "DELETE"):
        asked = f"{method} {path.format(part, task=front.task)} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n"
        login = f"Authorization: Bearer {front.tokens['viewer']}\r\nConnection: close\r\n\r\n"
        answer = front.raw(f"{asked}{login}".encode(), ends=False)
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert b"\nset-cookie" not in head and b"\rset-cookie" not in head, answer
        assert answer.startswith(b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.1 200"), answer
    assert front.state() == before


def test_the_name_of_a_stored_file_writes_no_header(front: Front) -> None:
    name = "a%0D%0ASet-Cookie:%20stolen=1%22.html"
    with front.client() as client:
        stored = client.post(f"/api/v1/results/{front.task}/files/{name}", content=b"<script>")
        if stored.status_code < 300:
            answer = client.get(f"/api/v1/results/{front.task}/files/{name}")
            assert "set-cookie" not in answer.headers
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "attachment" in answer.headers["content-disposition"]
            assert client.delete(f"/api/v1/results/{front.task}/files/{name}").status_code < 300
        else:
            assert is_refused(stored)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nContent-Length: 50\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 5, 6\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Content-Length : 5\r\n",
        b"X-Folded: a\r\n b: c\r\n\tContent-Length: 3\r\nContent-Length: x\r\n",
        b"X-Bare: a\nAuthorization: Bearer forged\r\nContent-Length: nan\r\n",
        b"X-Null: a\x00b\r\nContent-Length: 1\r\n",
        b"Host: other.example\r\nContent-Length: 1\r\n",
    ],
)
def test_a_head_that_two_servers_may_read_differently(front: Front, head: bytes) -> None:
    """Smuggling: no second request comes out of the first one's body, and nothing is stored."""
    before = front.state()
    second = b"POST /api/v1/results/smuggled/files/f HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx"
    body = b"0\r\n\r\n" + second
    auth = f"Authorization: Bearer {front.tokens['submitter']}\r\n".encode()
    answer = front.raw(b"POST /api/v1/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\n" + auth + head + b"\r\n" + body)
    assert answer.count(b"HTTP/1.1 2") == 0, answer
    assert front.state() == before


# -- bodies ---------------------------------------------------------------------------------------------------------

_LAUGHS = "a0: &a0 [lol, lol, lol, lol]\n" + "".join(
    f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 14)
)
BOMBS = {
    "YAML that laughs": _LAUGHS + "spec: *a13\n",
    "YAML that refers to itself": "spec: &a\n  taskType: echo\n  echo: *a\n",
    "YAML that makes an object": "spec: !!python/object/apply:os.system ['true']\n",
    "JSON as deep as it goes": "[" * 100_000 + "]" * 100_000,
    "mappings as deep as they go": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "a number without end": '{"taskType": "echo", "echo": {"steps": ' + "9" * 400_000 + "}}",
    "a number beyond all": '{"taskType": "echo", "echo": {"steps": 1e999999}}',
    "not a number": '{"taskType": "echo", "echo": {"steps": NaN}}',
    "a key given twice": '{"taskType": "echo", "taskType": "command", "echo": {}}',
    "half of a character": '{"taskType": "echo", "\\ud800": 1}',
    "no text": "\x00\x01\x02",
    "a body of 60 MB": "x" * (60 << 20),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("path", ["/api/v1/tasks", "/api/v1/pipelines", "/api/queue/submit", "/v1/chat/completions"])
def test_a_body_that_blows_up(front: Front, path: str, bomb: str) -> None:
    before, memory = front.state(), front.gateway.memory_bytes
    kind = "application/yaml" if bomb.startswith("YAML") else "application/json"
    with front.client("submitter") as client:
        try:
            answer = client.post(
                path, content=BOMBS[bomb].encode("utf-8", "surrogatepass"), headers={"Content-Type": kind}
            )
            assert is_refused(answer), (answer.status_code, answer.text[:300])
        except httpx.WriteError:
            pass  # it has hung up before the whole body came
        assert client.get("/api/v1/tasks").status_code == 200
    assert front.gateway.memory_bytes - memory < 256 << 20
    assert front.state() == before


@pytest.mark.parametrize("length", [1, 10, 1 << 40])
def test_a_length_that_lies(front: Front, length: int) -> None:
    before = front.state()
    auth = f"Authorization: Bearer {TOKEN}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode()
    answer = front.raw(
        b"POST /api/v1/results/lies/files/f HTTP/1.1\r\nHost: 127.0.0.1\r\n" + auth + b"x" * 5, ends=length > 1
    )
    if length > 1:
        assert b"HTTP/1.1 2" not in answer
        assert "lies/f" not in front.gateway.files()
        eventually(lambda: front.state() == before, what="the end of what has come in")
    else:
        assert front.gateway.files() == ["lies/f"], (
            "what was announced is stored, what comes after it is no second request"
        )
        with front.client() as client:
            assert client.get("/api/v1/results/lies/files/f").content == b"x"
            client.delete("/api/v1/results/lies/files/f")


# -- tokens ---------------------------------------------------------------------------------------------------------


def forged_tokens(front: Front) -> dict[str, str]:
    mine = read_token(front.tokens["submitter"])
    assert mine is not None
    secret = mine.text.rpartition("_")[2]
    return {
        "the id of another": new_token(mine.kind, mine.id).text,
        "of another kind": mine.text.replace("ut_", "wt_", 1),
        "its digest": f"ut_{mine.id}_{mine.digest[:43]}",
        "a pattern": f"ut_{'*' * 16}_{secret}",
        "a key of Redis": f"ut_../tokens_{secret}",
        "with another case": mine.text.upper(),
        "cut": mine.text[:-1],
        "longer": mine.text + "a",
        "half": f"ut_{mine.id}_",
        "as long as a header": "ut_" + "a" * 30_000,
    }


def test_tokens_that_are_none_open_nothing_and_are_counted_in_the_audit_log(front: Front) -> None:
    before = front.state()
    with front.client("") as client:
        for what, token in forged_tokens(front).items():
            for method, path in (("GET", f"/api/v1/tasks/{front.task}"), ("DELETE", f"/api/v1/tasks/{front.task}")):
                try:
                    answer = client.request(method, path, headers={"Authorization": f"Bearer {token}"})
                except httpx.RemoteProtocolError:
                    continue
                assert answer.status_code in (400, 401, 429, 431), (what, answer.text)
    assert front.state() == before

    def noted() -> bool:
        entries, _ = AuditLog(front.app.redis, Keys()).newest(Filter(action="gateway.wrong_token"), 5, "")
        return bool(entries) and "127.0.0.1" in json.dumps([entry.public() for entry in entries])

    eventually(noted, what="the wrong tokens in the audit log")
    assert not [token for token in forged_tokens(front).values() if token in front.gateway.log]


@pytest.mark.parametrize("who", ["viewer", "submitter", "ben"])
def test_a_token_does_not_rise(front: Front, who: str) -> None:
    """What needs another role or owner: admin routes, another's work, another's name."""
    before = front.state()
    theirs = {
        "apiVersion": "gpuflow/v1",
        "metadata": {"name": "t", "owner": "eve"},
        "spec": {"taskType": "echo", "echo": {}},
    }
    with front.client(who) as client:
        answers = [
            client.post("/api/admin/tokens", json={"role": "admin", "owner": "ana"}),
            client.post("/api/admin/workers", json={"name": "mine", "onlyFleet": True}),
            client.delete("/api/admin/workers/w1"),
            client.post("/api/admin/workers/w1/disable"),
            client.get("/api/admin/audit"),
            client.post("/api/v1/tasks", json=theirs),
            client.get("/metrics"),
            client.post("/api/v1/results/other/files/f", content=b"x"),
        ]
        if who == "ben":
            theirs_at = f"/api/v1/tasks/{front.task}"
            answers += [client.get(f"{theirs_at}{part}") for part in ("", "/logs", "/events", "/explain")]
            answers.append(client.delete(theirs_at))
    assert {one.status_code for one in answers} <= {403, 404}
    assert front.state() == before


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PATCH", "PUT", "PROPFIND"])
def test_a_method_that_nobody_offers(front: Front, method: str) -> None:
    before = front.state()
    with front.client() as client:
        assert client.request(method, f"/api/v1/tasks/{front.task}").status_code in (400, 404, 405)
    assert front.state() == before


@pytest.mark.parametrize(
    "value", ["1-0\x85data: x", "-1", "999999999999999999999-0", "*", "$", "1-0;DROP", "a" * 8000, "0-0 0-0"]
)  # fmt: skip
def test_a_position_of_a_stream_that_is_none(front: Front, value: str) -> None:
    before = front.state()
    with front.client("submitter") as client:
        answer = client.get(f"/api/v1/tasks/{front.task}/events", headers={"Last-Event-ID": value.encode("latin-1")})
    assert is_refused(answer), answer.text[:300]
    assert front.state() == before
