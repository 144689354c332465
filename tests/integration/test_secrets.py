"""Canaries: secrets are planted, printed, reported and failed with; then every place is searched for them."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from gpuflow.client import Task, submit, submit_pipeline
from gpuflow.errors import InvalidTemplate, NoCapableWorker
from gpuflow.explaining import explain
from gpuflow.fleet.registry import Fleet
from gpuflow.spec import parse
from gpuflow.submission_checks import problems_at_submit
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import BrokenPromise, eventually, patient

#: Never in Redis, nowhere: the values of `secrets`, the worker's own, and the user part of a URL that it holds.
HIDDEN = {
    "from_worker": "cnry-worker-a+b/81",
    "from_file": 'cnry-file-"c\\d"-82',
    "hub": "cnry-hub-83inherited",
    "proxy": "cnry-proxy-84",
    "hook": "cnry-hook-85",
}
#: In the spec, because the user has written them there, and nowhere else: gpuflow/v1 refuses them, see below.
WRITTEN = {"env": "cnry-env-91written", "header": "cnry-header-92", "url": "cnry-url-93", "hookpath": "cnry-path-94"}
ALL = {**HIDDEN, **WRITTEN}
#: Fields of a record that hold the spec; the message that is sent again at a retry has it in base64.
SPEC_FIELDS = {"spec", "message"}
END_OF_TEST = "the end of the test"


def spellings(value: str) -> list[str]:
    """Return how a search finds a value; written apart from the code under test."""
    raw = value.encode()
    shifted = [base64.b64encode(b"x" * shift + raw).decode()[4 if shift else 0 : -4] for shift in range(3)]
    return [value, json.dumps(value)[1:-1], urllib.parse.quote(value, safe=""), raw.hex(), *shifted]


def leaks(text: str, planted: dict[str, str] = ALL) -> set[str]:
    """Return the names of the canaries in a text and in the bodies of messages in it."""
    searched = with_bodies(text)
    return {name for name, value in planted.items() for spelling in spellings(value) if spelling in searched}


def with_bodies(text: str) -> str:
    """Return a text with what the base64 in it stands for: the bodies of messages."""
    runs = re.findall(r"[A-Za-z0-9+/]{40,}={0,2}", text)
    whole = [run.rstrip("=") for run in runs]
    bodies = [base64.b64decode(run + "=" * (-len(run) % 4)) for run in whole if len(run) % 4 != 1]
    return "\n".join([text, *(body.decode("utf-8", "replace") for body in bodies)])


def dump(client: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (key, field, value) of all that a server holds, of every type."""
    for key in client.scan_iter(count=1000):
        kind = client.type(key)
        if kind == "string":
            yield key, "", client.get(key)
        elif kind == "hash":
            yield from ((key, field, value) for field, value in client.hgetall(key).items())
        elif kind == "list":
            yield from ((key, "", value) for value in client.lrange(key, 0, -1))
        elif kind == "set":
            yield from ((key, "", value) for value in client.smembers(key))
        elif kind == "zset":
            yield from ((key, "", value) for value in client.zrange(key, 0, -1))
        elif kind == "stream":
            yield from ((key, "", json.dumps(entry, ensure_ascii=False)) for entry in client.xrange(key))
        elif kind != "none":  # it has gone since it was listed
            raise AssertionError(f"{key} is a {kind}: it is not searched")


def must_hide(found: Mapping[str, set[str]]) -> None:
    """Raise where something was found, by its place."""
    if leaked := {place: names for place, names in found.items() if names}:
        raise BrokenPromise(f"secrets are to be read: {leaked}")


def published(wire: Any, client: Any) -> str:
    """Return all that was sent to subscribers: Celery's events (what Flower shows), results, commands."""
    found: list[str] = []

    def both_ends() -> bool:
        while message := wire.get_message(timeout=0.2):
            found.append(str(message["data"]))
        sent = with_bodies("\n".join(found))
        return "task-succeeded" in sent and "task-failed" in sent

    eventually(both_ends, what="the events of a success and of a failure")
    client.publish("test", END_OF_TEST)  # what the server sent before, it sends before this
    while found[-1] != END_OF_TEST:
        message = wire.get_message(timeout=patient(30))
        assert message is not None, "the server sent nothing more to its subscriber"
        found.append(str(message["data"]))
    wire.close()
    return with_bodies("\n".join(found))


def without_spec(key: str, field: str, value: str) -> bool:
    return not (key.startswith("task:") and field in SPEC_FIELDS)


def spec(fleet: TestFleet, hook: str, **echo: Any) -> dict[str, Any]:
    said = " ".join(f"${{env:{name}}}" for name in ("MY_TOKEN", "FILE_SECRET", "HF_TOKEN", "HTTP_PROXY", "DB_PASSWORD"))
    shown = f"{said} ${{env:JOINED}} ${{env:SOURCE_URL}} Authorization: Bearer {WRITTEN['header']}"
    task = {
        **fleet.echo(
            stderr=shown,
            message=said,
            report_env=[
                "MY_TOKEN",
                "FILE_SECRET",
                "HF_TOKEN",
                "HTTP_PROXY",
                "DB_PASSWORD",
                "JOINED",
                "SOURCE_URL",
                "MODE",
            ],
            **echo,
        ),
        "env": {
            "DB_PASSWORD": WRITTEN["env"],
            "MODE": "plain-and-kept",
            "JOINED": "<${env:MY_TOKEN}>",
            "SOURCE_URL": f"https://{WRITTEN['url']}@host.invalid/x",
        },
        "secrets": ["MY_TOKEN", "FILE_SECRET", "HOOK_TOKEN"],
        "notify": [
            {
                "on": ["finished"],
                "url": f"{hook}/{WRITTEN['hookpath']}",
                "headers": {"X-Plain": WRITTEN["header"], "Authorization": "Bearer ${env:HOOK_TOKEN}"},
            }
        ],
    }
    # Another project's templates are taken as they are, plain secrets too.
    return {"apiVersion": "flowmesh/v1", "kind": "InferenceTask", "metadata": {"name": "canaries"}, "spec": task}


class Hook:
    """A receiver of notices on loopback."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, str], str]] = []
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                seen.append((dict(self.headers), body))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class UnixConnection(HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=patient(60))
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(patient(60))
        self.sock.connect(str(self._path))


class Flower:
    """A real Flower on a fleet's broker. It listens on a socket of its own, as a port could be taken meanwhile."""

    def __init__(self, fleet: TestFleet) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="flower-"))  # a path of a Unix socket is short
        self.log = fleet.folder / "flower.log"
        argv = ["-A", "gpuflow", "flower", f"--unix-socket={self._folder / 's'}"]
        environment = {**os.environ, "REDIS_URL": fleet.broker.url, "FLOWER_UNAUTHENTICATED_API": "true"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", *argv], cwd=fleet.folder, env=environment, stdout=log, stderr=log
            )
        try:
            eventually(lambda: self.get("/healthcheck"), within=60, what="Flower")
        except BaseException:
            self.close()
            raise

    def get(self, path: str) -> str:
        """Return a page, or nothing where there is none."""
        connection = UnixConnection(self._folder / "s")
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, HTTPException):
            return ""
        finally:
            connection.close()
        return text if answer.status == 200 else ""

    def sees(self, worker: str) -> bool:
        """Whether an event of a worker has come here: those that follow will come too."""
        return worker in self.get("/workers?json=1")

    def pages(self, tasks: Sequence[Task]) -> str:
        """Return what its API and its pages say of the tasks and the workers."""
        paths = ["/api/tasks", "/api/workers?refresh=1", "/workers", "/tasks", "/broker"]
        for task in tasks:
            paths += [f"/api/task/info/{task.id}", f"/api/task/result/{task.id}", f"/task/{task.id}"]
        return "\n".join(self.get(path) for path in paths)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=patient(20))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture
def flower(fleet: TestFleet) -> Iterator[Flower]:
    made = Flower(fleet)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    try:
        yield made
    finally:
        made.close()


def worker_env(folder: Path) -> dict[str, str]:
    secrets = folder / "worker-secrets"
    secrets.mkdir()
    for name, value in (("FILE_SECRET", HIDDEN["from_file"]), ("HOOK_TOKEN", HIDDEN["hook"])):
        (secrets / name).write_text(value + "\n")
        (secrets / name).chmod(0o600)
    return {
        "MY_TOKEN": HIDDEN["from_worker"],
        "HF_TOKEN": HIDDEN["hub"],
        "HTTP_PROXY": f"http://me:{HIDDEN['proxy']}@127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
        "GPUFLOW_SECRETS_DIR": str(secrets),
        "GPUFLOW_PASS_ENV": "HF_TOKEN,HTTP_PROXY",  # whole, to every child: what is hidden must be hidden there too
    }


@pytest.mark.timeout(1200)
def test_no_canary_is_found_anywhere(fleet: TestFleet, tmp_path: Path, hook: Hook, flower: Flower) -> None:
    wire = fleet.broker.client.pubsub(ignore_subscribe_messages=True)
    patterns = fleet.broker.client.pubsub_numpat()
    wire.psubscribe("*")
    eventually(lambda: fleet.broker.client.pubsub_numpat() > patterns, what="the subscription")
    worker = fleet.start_worker("w1", env=worker_env(tmp_path))
    eventually(lambda: flower.sees("w1"), within=60, what="the first event of the worker in Flower")
    talks = "${env:MY_TOKEN} and ${env:FILE_SECRET} at http://u:${env:HF_TOKEN}@h, ${env:DB_PASSWORD}"

    done = submit(spec(fleet, hook.url, output={"told": talks, "${env:MY_TOKEN}": 1}, steps=2), app=fleet.app)
    failed = submit(spec(fleet, hook.url, fail={"type": "Boom", "message": talks}), app=fleet.app)
    contradicts = submit(spec(fleet, hook.url, exit_code=3, output=talks), app=fleet.app)
    result = done.get(timeout=patient(60))
    for task in (failed, contradicts):
        assert task.wait(timeout=patient(60)).state == "FAILED"
    long = spec(fleet, hook.url, until_exists=str(tmp_path / "never"))
    killed = submit({**long, "spec": {**long["spec"], "retry": {"max_attempts": 1}}}, app=fleet.app)
    eventually(lambda: any(event.name == "log" for event in fleet.app.event_log.read(killed.id)))
    inspect = fleet.app.control.inspect(timeout=patient(60), limit=1)
    told = [inspect.active(), inspect.query_task(killed.id), inspect.stats(), inspect.reserved(), inspect.conf()]
    told.append(inspect.report())
    told.append(flower.pages([killed]))
    (child,) = worker.supervised()
    child.kill()
    assert killed.wait(timeout=patient(60)).error["type"] == "ChildKilled"
    eventually(lambda: len(hook.seen) == 4, within=30, what="four notices")
    eventually(lambda: fleet.app.AsyncResult(killed.id).state == "FAILURE")

    # The child had them, the receiver got them, and the user sees that something was there.
    assert result["environment"]["MODE"] == "plain-and-kept"
    assert result["environment"]["JOINED"] == "<***>"
    assert set(result["message"].split()) == {"***", "http://me:***@127.0.0.1:9"}
    assert "***" in failed.record().error["message"]
    assert {headers["Authorization"] for headers, _ in hook.seen} == {f"Bearer {HIDDEN['hook']}"}
    assert {headers["X-Plain"] for headers, _ in hook.seen} == {WRITTEN["header"]}

    tasks = [done, failed, contradicts, killed]
    assert told[0] and told[1] and killed.id in json.dumps(told[0])
    shown = {
        "inspect": json.dumps(told, default=str),
        "notices": json.dumps([body for _, body in hook.seen]),
        "status": json.dumps([task.status() for task in tasks]),
        "attempts": json.dumps([[entry.public() for entry in task.attempts()] for task in tasks]),
        "celery": json.dumps([fleet.app.backend.get_task_meta(task.id) for task in tasks], default=str),
        "worker log": worker.log(),
        "published": published(wire, fleet.broker.client),
        "flower": eventually(lambda: pages_of_all(flower, tasks), within=60, what="all tasks in Flower"),
        "flower's log": flower.log.read_text(),
    }
    shown |= over_http(fleet, tmp_path, tasks)
    shown |= {
        f"{key} {field}": value for key, field, value in dump(fleet.broker.client) if without_spec(key, field, "")
    }
    shown |= {str(path): path.read_text(errors="replace") for path in fleet.results.rglob("*") if path.is_file()}
    planted = {**ALL, "broker": urlsplit(fleet.broker.url).password or parse_qs(fleet.broker.url)["password"][0]}
    must_hide({place: leaks(text, planted) for place, text in shown.items()})
    assert any("executor.log" in place for place in shown) and len(shown) > 40

    everything = "\n".join(f"{key} {field} {value}" for key, field, value in dump(fleet.broker.client))
    must_hide({"the broker": leaks(everything, HIDDEN)})
    assert leaks(everything) == set(WRITTEN), "the spec has not what the user wrote into it"
    files = [path for path in fleet.broker.data.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > 10_000
    must_hide({str(path): leaks(path.read_bytes().decode("latin-1"), HIDDEN) for path in files})


def over_http(fleet: TestFleet, folder: Path, tasks: Sequence[Task]) -> dict[str, str]:
    """Return what the gateway answers about the tasks: API, event streams, audit log, metrics, and its own log."""
    found: dict[str, str] = {}
    env = {"REDIS_URL": fleet.broker.url}
    with Gateway(folder, env=env, root=fleet.results) as front, httpx.Client(
        base_url=front.url, headers=front.headers, timeout=patient(60)
    ) as client:  # fmt: skip
        paths = ["/api/v1/tasks", "/api/v1/pipelines", "/api/workers", "/api/workers/w1", "/api/queues", "/metrics",
                 "/api/admin/audit?limit=200", "/api/admin/workers", "/api/v1/results"]  # fmt: skip
        for task in tasks:
            paths += [f"/api/v1/tasks/{task.id}{part}" for part in ("", "/events", "/logs", "/explain")]
            paths.append(f"/api/v1/results/{task.id}/files")
        for path in paths:
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            found[f"GET {path}"] = answer.text
        for place in ("GET /api/v1/tasks", "GET /api/admin/audit?limit=200"):
            assert all(task.id in found[place] for task in tasks), place
        headers = {"Authorization": f"Bearer {HIDDEN['hub']}"}
        elsewhere = {"type": "http", "url": "https://host.invalid/api/v1/results", "headers": headers}
        secret = {**fleet.echo(output=1), "env": {"DB_PASSWORD": WRITTEN["env"]}, "output": {"destination": elsewhere}}
        refused = client.post("/api/v1/tasks", json={"apiVersion": "gpuflow/v1", "spec": secret})
        found["a refusal of the gateway"] = refused.text
        assert refused.status_code == 422 and "write secrets" in refused.text
        found["the gateway's log"] = front.log
    return found


def pages_of_all(flower: Flower, tasks: Sequence[Task]) -> str:
    """Return Flower's pages once each of the tasks is in three of them, "" before."""
    found = flower.pages(tasks)
    return found if all(found.count(task.id) >= 3 for task in tasks) else ""


def test_secrets_in_plain_text_are_refused_and_nothing_of_them_is_written(fleet: TestFleet) -> None:
    task = {
        **fleet.echo(output=1),
        "env": {"DB_PASSWORD": WRITTEN["env"], "SOURCE_URL": f"https://{WRITTEN['url']}@host.invalid/x"},
        "notify": [{"on": ["failed"], "url": "https://host.invalid", "headers": {"X-Api-Key": WRITTEN["header"]}}],
        "output": {
            "destination": {
                "type": "http",
                "url": "https://host.invalid/api/v1/results",
                "headers": {"Authorization": f"Bearer {HIDDEN['hub']}"},
            }
        },
    }
    pipeline = {"apiVersion": "gpuflow/v1", "spec": {"stages": [{"name": "one", "spec": task}]}}

    for attempt in (
        lambda: submit(task, app=fleet.app),
        lambda: submit_pipeline(pipeline, app=fleet.app),
    ):
        with pytest.raises(InvalidTemplate) as refused:
            attempt()
        told = str(refused.value)
        for place in ("env.DB_PASSWORD", "env.SOURCE_URL", "notify[0].headers.X-Api-Key", "headers.Authorization"):
            assert f"{place}: " in told
        assert "write secrets: [DB_PASSWORD] in its place" in told
        assert len(refused.value.mistakes) == 4
        must_hide({"the refusal": leaks(told)})
    must_hide({f"{key} {field}": leaks(value) for key, field, value in dump(fleet.broker.client)})


def test_with_secrets_by_name_no_canary_is_in_redis_at_all(fleet: TestFleet, tmp_path: Path, hook: Hook) -> None:
    """Env, secrets, headers, URLs: the whole dump, the specs and the messages too, during the run and after it."""
    gate = tmp_path / "gate"
    fleet.start_worker("w1", env={**worker_env(tmp_path), "DB_PASSWORD": WRITTEN["env"], "USER_PART": WRITTEN["url"]})
    task = {
        **fleet.echo(
            stderr="${env:DB_PASSWORD} ${env:SOURCE_URL} ${env:MY_TOKEN}",
            message="${env:SOURCE_URL}",
            report_env=["DB_PASSWORD", "SOURCE_URL", "MY_TOKEN"],
            until_exists=str(gate),
        ),
        "env": {"SOURCE_URL": "https://${env:USER_PART}@host.invalid/x"},
        "secrets": ["DB_PASSWORD", "USER_PART", "MY_TOKEN", "HOOK_TOKEN"],
        "notify": [{"on": ["finished"], "url": hook.url, "headers": {"Authorization": "Bearer ${env:HOOK_TOKEN}"}}],
    }

    sent = submit(task, app=fleet.app)
    pipeline = {"apiVersion": "gpuflow/v1", "spec": {**task, "stages": [{"name": "one", "spec": {}}]}}
    run = submit_pipeline(pipeline, app=fleet.app)
    dumps = []
    eventually(lambda: any(event.name == "log" for event in fleet.app.event_log.read(sent.id)), what="the child")
    dumps.append(list(dump(fleet.broker.client)))
    assert sent.state == "RUNNING"
    gate.touch()
    result = sent.get(timeout=patient(60))
    run.wait(timeout=patient(60))
    eventually(lambda: len(hook.seen) == 2, within=30, what="two notices")
    dumps.append(list(dump(fleet.broker.client)))

    assert set(result["environment"].values()) == {"***", "https://***@host.invalid/x"}
    assert {headers["Authorization"] for headers, _ in hook.seen} == {f"Bearer {HIDDEN['hook']}"}
    for found in dumps:
        assert len(found) > 20
        must_hide({"the broker": leaks("\n".join(f"{key} {field} {value}" for key, field, value in found))})


def test_a_task_waits_for_a_worker_that_offers_its_secrets(fleet: TestFleet, tmp_path: Path) -> None:
    """It lies for others, whatever comes by; explain and submit name the secret, and nobody its value."""
    first = fleet.start_worker("w1", env={**worker_env(tmp_path), "GPUFLOW_ALLOW_SECRETS": ""})
    wants = {**fleet.echo(output=1), "secrets": ["ONLY_THERE", "HERE_AND_THERE"]}
    waits = submit(wants, app=fleet.app)
    assert submit(fleet.echo(output=2), app=fleet.app).get(timeout=patient(30))["output"] == 2

    told = explain(waits.id, app=fleet.app)[0]
    template = parse({"apiVersion": "gpuflow/v1", "kind": "Task", "spec": wants})
    with pytest.raises(NoCapableWorker) as problem:
        problems_at_submit(fleet.app, template, fail_fast=True)

    assert waits.state == "QUEUED"
    assert told.workers[0].kind == "not_allowed"
    for text in (told.workers[0].text, str(problem.value)):
        assert "offers tasks no secret HERE_AND_THERE and no ONLY_THERE" in text
        assert "GPUFLOW_SECRETS_DIR" in text
    folder = tmp_path / "w2-secrets"
    folder.mkdir()
    (folder / "ONLY_THERE").write_text("value-of-one")
    (folder / "ONLY_THERE").chmod(0o600)
    fleet.start_worker(
        "w2",
        env={
            "GPUFLOW_SECRETS_DIR": str(folder),
            "GPUFLOW_ALLOW_SECRETS": "",
            "GPUFLOW_SECRET_HERE_AND_THERE": "value-of-other",
        },
    )
    assert waits.wait(timeout=patient(30)).worker == "w2"
    entries = json.dumps([entry.load for entry in Fleet(fleet.app.redis, fleet.app.keys).workers()])
    assert "HERE_AND_THERE" in entries
    assert "value-of" not in entries
    assert "ONLY_THERE" not in first.log()


def test_a_secret_that_becomes_a_file_is_offered_at_the_next_heartbeat(fleet: TestFleet, tmp_path: Path) -> None:
    folder = tmp_path / "secrets-of-w1"
    folder.mkdir()
    env = {"GPUFLOW_SECRETS_DIR": str(folder), "GPUFLOW_ALLOW_SECRETS": "", "HEARTBEAT_INTERVAL_SEC": "1"}
    fleet.start_worker("w1", env=env)
    task = submit({**fleet.echo(output=1), "secrets": ["LATER"]}, app=fleet.app)
    (folder / ".LATER").write_text("hidden-from-all")
    (folder / ".LATER").chmod(0o600)

    (folder / ".LATER").rename(folder / "LATER")

    assert task.get(timeout=patient(30))["output"] == 1


def test_a_secret_that_cannot_be_read_fails_the_task_at_once_and_names_the_worker(
    fleet: TestFleet, tmp_path: Path
) -> None:
    folder = tmp_path / "open-secrets"
    folder.mkdir()
    (folder / "FOR_ALL").write_text("hidden-from-all")
    (folder / "FOR_ALL").chmod(0o644)
    fleet.start_worker("w1", env={"GPUFLOW_SECRETS_DIR": str(folder)})

    for name in ("FOR_ALL", "CELERY_BROKER_URL"):  # the second is given to no task by any worker
        task = submit({**fleet.echo(output=1), "secrets": [name], "retry": {"max_attempts": 3}}, app=fleet.app)
        record = task.wait(timeout=patient(30))
        assert (record.state, record.attempt, record.error["type"]) == ("FAILED", 1, "MissingSecret")
        assert "worker w1" in record.error["message"] and name in record.error["message"]
