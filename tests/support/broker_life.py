"""Everything that the processes of a fleet do with their broker, each logged in as a user of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from celery import chord
from click.testing import CliRunner

from gpuflow.celery_app import GPUFlow
from gpuflow.cli import cli
from gpuflow.client import get, submit, submit_pipeline
from gpuflow.errors import TaskFailed
from gpuflow.fleet.orders import order_worker
from gpuflow.fleet.registry import Fleet
from gpuflow.gateway.rights import ROUTES
from gpuflow.settings import Settings
from tests.support.fleet import TestFleet, keep_log
from tests.support.gateway import TOKEN, Gateway
from tests.support.monitored_fleet import FlowerProcess
from tests.support.waiting import eventually, patient

FLOWER_PAGES: Final = ("fleet", "queues", "pipelines", "scaling", "dead-letters", "merge")
_FAILING: Final = {
    "taskType": "echo",
    "echo": {"fail": {"message": "boom", "retryable": True}},
    "retry": {"max_attempts": 1},
}


@dataclass(frozen=True, kw_only=True)
class Logins:
    """The address of the broker with the login of each kind of process."""

    client: str
    operator: str
    gateway: str
    beat: str
    flower: str
    flower_actions: str


@contextlib.contextmanager
def app_as(fleet: TestFleet, url: str) -> Iterator[GPUFlow]:
    """An app of this process that logs in by this address."""
    env = {
        **fleet.env,
        "REDIS_URL": url,
        "RESULTS_DIR": str(fleet.results),
        "GPUFLOW_STATE_DIR": str(fleet.settings.state_dir),
    }
    app = GPUFlow("user", settings=Settings.load(env=env, cwd=fleet.folder), set_as_current=False)
    try:
        yield app
    finally:
        app.backend.result_consumer.stop()
        app.close()
        app.redis.close()


def gpuflow(fleet: TestFleet, url: str, *arguments: str, code: int = 0) -> str:
    """Run a command as a user of the broker; return what it says."""
    env = {**fleet.env, "REDIS_URL": url, "GPUFLOW_STATE_DIR": str(fleet.settings.state_dir)}
    done = CliRunner().invoke(cli, list(arguments), env=env)
    assert done.exit_code == code, (arguments, done.output, done.exception)
    return done.output


def template(fleet: TestFleet, *specs: Mapping[str, Any]) -> dict[str, Any]:
    stages = [{"name": f"s{number}", "spec": dict(spec)} for number, spec in enumerate(specs)]
    return {"apiVersion": "gpuflow/v1", "metadata": {"name": "p"}, "spec": {"taskType": "echo", "stages": stages}}


def _ended(run: Any) -> None:
    with contextlib.suppress(TaskFailed):
        run.wait(timeout=patient(60))


def client_life(fleet: TestFleet, url: str) -> None:
    """Submit work of every kind, follow it, read all that is to be read."""
    with app_as(fleet, url) as app:
        tasks = [submit(fleet.echo(output=number, steps=2), app=app) for number in range(2)]
        tasks += [submit({**fleet.echo(output="m"), "merge": "always"}, app=app) for _ in range(3)]
        known = [submit(fleet.echo(output=1), app=app, idempotency_key="again") for _ in range(2)]
        run = submit_pipeline(template(fleet, fleet.echo(output=1), fleet.echo(output="${s0.result.output}")), app=app)
        failing = submit(_FAILING, app=app)
        delayed = app.send_task("gpuflow.echo", kwargs={"spec": fleet.echo(output=7)}, countdown=0.5)
        demanding = submit(
            {**fleet.echo(output=1), "resources": {"hardware": {"gpu": {"type": "h100", "count": 8}}}}, app=app
        )
        added = app.send_task("plain_tasks.add", args=(2, 3))
        echoes = [app.signature("gpuflow.echo", kwargs={"spec": fleet.echo(output=number)}) for number in range(3)]
        joined = chord(echoes)(app.signature("plain_tasks.add", args=(40, 2), immutable=True))
        assert [task.get(timeout=patient(60))["output"] for task in tasks] == [0, 1, "m", "m", "m"]
        assert known[0].id == known[1].id
        assert list(get(tasks[0].id, app=app).events())
        run.wait(timeout=patient(60))
        assert str(run.state) == "SUCCEEDED"
        failing.wait(timeout=patient(60))
        assert delayed.get(timeout=patient(60))["output"] == 7
        assert added.get(timeout=patient(60)) == 5
        assert joined.get(timeout=patient(60)) == 42
    (fleet.folder / "echo.yaml").write_text("taskType: echo\necho: {output: 3}\n")
    gpuflow(fleet, url, "submit", str(fleet.folder / "echo.yaml"), "--wait")
    gpuflow(fleet, url, "status")
    for arguments in (("status", run.id), ("status", tasks[0].id), ("explain", demanding.id), ("logs", run.id),
                      ("result", run.id), ("queues",), ("workers",), ("workers", "show", "w1"), ("dead",),
                      ("usage",), ("scaling",), ("schedules", "list")):  # fmt: skip
        gpuflow(fleet, url, *arguments)


def operator_life(fleet: TestFleet, url: str) -> None:
    """Cancel, retry, resume, drain, order workers, schedule, read the audit log."""
    with app_as(fleet, url) as app:
        waiting = submit(
            {**fleet.echo(output=1), "resources": {"hardware": {"gpu": {"type": "h100", "count": 8}}}}, app=app
        )
        assert waiting.cancel() == "cancelled"
        held = submit(fleet.echo(until_exists=str(fleet.folder / "never")), app=app)
        eventually(lambda: held.state == "RUNNING", what="a task that runs")
        held.cancel()
        held.wait(timeout=patient(60))
        slow = fleet.echo(output="x", until_exists=str(fleet.folder / "never"))
        merged = [submit({**slow, "merge": "always"}, app=app) for _ in range(2)]
        for task in merged:
            task.cancel()
        dead = submit(_FAILING, app=app)
        dead.wait(timeout=patient(60))
        run = submit_pipeline(template(fleet, fleet.echo(output=1), _FAILING), app=app)
        _ended(run)
        other = submit_pipeline(template(fleet, fleet.echo(until_exists=str(fleet.folder / "never"))), app=app)
        assert other.cancel()
        for task in merged:
            task.wait(timeout=patient(60))
    for arguments in (("dead",), ("dead", "show", dead.id), ("dead", "retry", dead.id), ("resume", run.id),
                      ("workers", "disable", "w1"), ("workers", "enable", "w1"), ("audit",), ("audit", "--verify"),
                      ("schedules", "add", str(fleet.folder / "echo.yaml"), "--cron", "0 0 * * *", "--name", "nightly"),
                      ("serve", "/models/one", "--name", "one", "--accelerators", "cpu"), ("serve", "--list"),
                      ("schedules", "list"), ("queues",), ("workers",), ("usage",), ("scaling",)):  # fmt: skip
        gpuflow(fleet, url, *arguments)
    with app_as(fleet, url) as app:
        eventually(lambda: get(dead.id, app=app).state == "DEAD", what="the dead letter again")
    gpuflow(fleet, url, "dead", "purge", dead.id)
    gpuflow(fleet, url, "schedules", "remove", "nightly")
    gpuflow(fleet, url, "serve", "one", "--stop")


def gateway_life(fleet: TestFleet, url: str) -> None:
    """Call every route of a gateway, those with an effect with one."""
    env = {**fleet.env, "REDIS_URL": url, "GPUFLOW_SERVED_MODELS": "tiny=tiny-random"}
    with Gateway(fleet.folder, env=env, root=fleet.results) as front, httpx.Client(
        base_url=front.url, headers=front.headers, timeout=patient(60)
    ) as http:  # fmt: skip
        task = http.post("/api/v1/tasks", json={"spec": fleet.echo(output=1)} | _HEAD).json()
        run = http.post("/api/v1/pipelines", json=template(fleet, fleet.echo(output=1), _FAILING)).json()
        held = http.post(
            "/api/v1/tasks", json={"spec": fleet.echo(until_exists=str(fleet.folder / "never"))} | _HEAD
        ).json()
        with http.stream("GET", f"/api/v1/tasks/{task['id']}/events") as stream:
            assert "SUCCEEDED" in "".join(stream.iter_text())
        eventually(
            lambda: http.get(f"/api/v1/pipelines/{run['id']}").json()["state"] == "FAILED", what="the pipeline's end"
        )
        resumed = http.post(f"/api/v1/pipelines/{run['id']}/resume")
        assert resumed.status_code < 300, resumed.text
        assert http.delete(f"/api/v1/tasks/{held['id']}").status_code < 300
        eventually(lambda: http.get(f"/api/v1/tasks/{held['id']}").json()["state"] == "CANCELLED", what="the cancel")
        assert http.post(f"/api/v1/tasks/{held['id']}/retry").status_code < 300
        assert http.delete(f"/api/v1/tasks/{held['id']}").status_code < 300
        made = http.post("/api/admin/tokens", json={"role": "viewer", "owner": "ana"}).json()
        with httpx.Client(base_url=front.url, headers={"Authorization": f"Bearer {made['token']}"}) as ana:
            assert ana.get("/api/v1/tasks").status_code == 200
        assert http.delete(f"/api/admin/tokens/{made['id']}").status_code == 204
        served = {"model": "/models/two", "name": "two", "accelerators": "cpu"}
        assert http.post("/api/admin/models", json=served).status_code == 201
        assert http.delete("/api/admin/models/two").status_code == 204
        assert http.get("/api/v1/tasks", headers={"Authorization": "Bearer wrong"}).status_code == 401
        for method, route in ROUTES:
            path = route.replace("{id}", task["id"] if "tasks" in route else run["id"]).replace("{task_id}", task["id"])
            path = path.replace("{name:path}", "one.txt")
            if route.endswith("/events") or (method, route) in _OF_USERS or "/v1/chat" in route:
                continue
            answer = http.request(method, path, content=b"{}" if method == "POST" else None)
            assert answer.status_code < 500, (method, path, answer.text)
        for order in ("disable", "enable"):
            assert http.post(f"/api/admin/workers/w1/{order}").status_code < 300
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        with contextlib.suppress(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json=chat, timeout=1.0)
        assert TOKEN not in front.log


_HEAD: Final = {"apiVersion": "gpuflow/v1", "kind": "Task", "metadata": {"name": "t"}}
#: Routes that make and remove users of the broker: only a gateway that may do that offers them.
_OF_USERS: Final = {
    ("POST", "/api/admin/workers"),
    ("DELETE", "/api/admin/workers/{id}"),
    ("POST", "/api/admin/workers/{id}/token"),
    ("POST", "/api/admin/workers/{id}/drain"),
}


class Beat:
    """One `celery -A gpuflow beat` process. A context manager."""

    def __init__(self, fleet: TestFleet, url: str, env: Mapping[str, str]) -> None:
        self.log_path = fleet.folder / "beat.log"
        keep_log(self)
        environment = {**os.environ, **fleet.env, "REDIS_URL": url, "RESULTS_DIR": str(fleet.results),
                       "GPUFLOW_STATE_DIR": str(fleet.settings.state_dir), **env}  # fmt: skip
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "gpuflow", "beat", "-l", "INFO"],
                env=environment, cwd=fleet.folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def __enter__(self) -> Beat:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(timeout=patient(30))


def beat_life(fleet: TestFleet, url: str) -> None:
    """Sweep, reconcile, seal and trim the audit log, submit a schedule, scale."""
    app = fleet.app
    (fleet.folder / "echo.yaml").write_text("taskType: echo\necho: {output: 3}\n")
    gpuflow(
        fleet,
        fleet.broker.url,
        "schedules",
        "add",
        str(fleet.folder / "echo.yaml"),
        "--cron",
        "0 0 * * *",
        "--name",
        "missed",
    )
    order_worker(Fleet(app.redis, app.keys), app.control.broadcast, "w1", "release", "the test")
    record = json.loads(str(app.redis.hget(app.keys.schedules, "missed")))
    record["createdAt"] -= 2 * 86_400
    app.redis.hset(app.keys.schedules, "missed", json.dumps(record))
    app.redis.hdel(app.keys.metrics, "reconciled_at")
    quick = {"GPUFLOW_LEASE_SEC": "2", "ELASTIC_AUTO_POLL_INTERVAL_SEC": "0.3", "GPUFLOW_AUDIT_MAX_ENTRIES": "512",
             "ELASTIC_AUTO_TOGGLE_COOLDOWN_SEC": "0.5", "ELASTIC_AUTO_DISABLE_IDLE_SEC": "1",
             "ELASTIC_AUTO_MIN_ACTIVE_WORKERS": "0"}  # fmt: skip
    pipe = app.redis.pipeline()
    for number in range(1200):
        pipe.xadd(app.keys.audit, {"action": "a", "actor": "test", "target": str(number)})
    pipe.execute()
    with Beat(fleet, url, quick) as beat:
        eventually(lambda: app.redis.hget(app.keys.schedule_runs, "missed"), what="the missed run")
        eventually(lambda: app.redis.hget(app.keys.metrics, "reconciled_at"), what="the reconciler")
        eventually(lambda: b"trim" in _last_link(app), what="a trim")
        eventually(lambda: app.redis.lrange(app.keys.scaling_decisions, 0, 0), what="a decision of scaling")
        assert "duties_not_done" not in beat.log() and "NOPERM" not in beat.log(), beat.log()[-3000:]
    gpuflow(fleet, fleet.broker.url, "schedules", "remove", "missed")
    gpuflow(fleet, fleet.broker.url, "workers", "enable", "w1")


def _last_link(app: GPUFlow) -> bytes:
    return repr(app.redis.xrevrange(app.keys.audit_chain, count=20)).encode()


def flower_life(fleet: TestFleet, url: str, *, acts: bool) -> str:
    """Look at every page, of Flower too; with `acts` press buttons. Return its log."""
    name = f"flower-{uuid.uuid4().hex[:6]}"
    with FlowerProcess(fleet, name, env={**fleet.env, "REDIS_URL": url}) as flower, flower.client() as user:
        run = submit_pipeline(template(fleet, fleet.echo(output=1), _FAILING), app=fleet.app)
        _ended(run)
        for page in FLOWER_PAGES:
            assert user.get(f"/{page}").status_code == 200, page
            assert user.get(f"/{page}/updates").status_code == 200, page
        assert user.get(f"/pipelines/{run.id}").status_code == 200
        for path in ("workers", "workers?refresh=1", "tasks", "broker", "api/workers", "api/workers?refresh=1",
                     "api/queues/length"):  # fmt: skip
            assert user.get(f"/{path}").status_code < 400, path
        shown = user.get("/fleet").text
        if not acts:
            assert "read-only" in shown
        else:
            token = re.search(r'data-token="([^"]+)"', shown)
            assert token
            held = submit(fleet.echo(until_exists=str(fleet.folder / "never")), app=fleet.app)
            eventually(lambda: held.state == "RUNNING", what="a task that runs")
            for action, target in (("cancel", held.id), ("resume", run.id), ("disable", "w1"), ("enable", "w1"),
                                   ("release", "w1")):  # fmt: skip
                answer = user.post("/monitor/action", json={"action": action, "target": target},
                                   headers={"X-XSRFToken": token[1]})  # fmt: skip
                assert answer.status_code == 200, (action, answer.text)
            held.wait(timeout=patient(60))
            _ended(run)
        return flower.log_path.read_text("utf-8", "replace")


def whole_life(fleet: TestFleet, logins: Logins) -> None:
    """Do all of it, one process after another; a worker serves meanwhile."""
    beat_life(fleet, logins.beat)
    with Beat(fleet, logins.beat, {"GPUFLOW_LEASE_SEC": "2", "ENABLE_ELASTIC_SCALING": "0"}) as beat:
        client_life(fleet, logins.client)
        operator_life(fleet, logins.operator)
        gateway_life(fleet, logins.gateway)
        for url, acts in ((logins.flower, False), (logins.flower_actions, True)):
            log = flower_life(fleet, url, acts=acts)
            assert "permission" not in log.lower(), log[-3000:]
        assert "permission" not in beat.log().lower(), beat.log()[-3000:]


def worker_environment(folder: Path) -> dict[str, str]:
    """Return what the fleet of such a life is started with."""
    return {"GPUFLOW_KEY_PREFIX": "t1:", "HEARTBEAT_INTERVAL_SEC": "1", "GPUFLOW_ENV_DIR": str(folder / "envs")}
