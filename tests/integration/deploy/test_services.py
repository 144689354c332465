"""Every service of docker-compose.yml is started by its exact command line, as processes of this machine.

No container engine is needed: the commands and variables are those of the file; only addresses, ports and folders are
those of the test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml
from prometheus_client.parser import text_string_to_metric_families
from redis.backoff import NoBackoff
from redis.retry import Retry

from gpuflow.broker.embedded import _shipped_program
from tests.support.collector import Collector
from tests.support.fleet import ROOT, keep_log
from tests.support.waiting import eventually, patient

VARIABLES = {
    "VALKEY_PASSWORD": "passwordOfTheTest0123456789",
    "GPUFLOW_WORKER_TOKEN": "tokenOfTheTest0123456789",
    "FLOWER_PASSWORD": "flowerOfTheTest0123456789",
    "GRAFANA_PASSWORD": "grafanaOfTheTest0123456789",
    "GPUFLOW_COST_PER_HOUR": "3.6",
}
HEADERS = {"Authorization": f"Bearer {VARIABLES['GPUFLOW_WORKER_TOKEN']}"}
SERVICES = ("gateway", "beat", "flower", "worker-cpu")


def resolved(text: str, variables: Mapping[str, str]) -> str:
    """Replace the variables of a text as Compose does."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2] or ""
        assert name in variables or not default.startswith(":?"), f"{name} is required"
        return variables.get(name, default.removeprefix(":-"))

    return re.sub(r"\$\{([A-Z_]+)(:[-?][^}]*)?\}", value, text).replace("$$", "$")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def status_of(url: str) -> int | None:
    """Return the status of an answer, None while nobody answers."""
    try:
        return httpx.get(url).status_code
    except httpx.TransportError:
        return None


class Service:
    """One service as a process of this machine."""

    def __init__(self, folder: Path, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        keep_log(self)
        self.environment = dict(environment)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def health(self, *arguments: str) -> bool:
        """Say whether its check of health is content."""
        command = [sys.executable, str(ROOT / "deploy" / "docker" / "health.py"), *arguments]
        return subprocess.run(command, env=self.environment, check=False, capture_output=True).returncode == 0

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(patient(60))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(patient(30))


class Composed:
    """All services that need no image of others, on ports of loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.collector = Collector()
        self._variables = {
            **VARIABLES,
            "GPUFLOW_TRACES": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.url,
        }
        self.compose: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
        self.ports = {name: free_port() for name in ("valkey", "gateway", "flower")}
        self.services: dict[str, Service] = {}
        programs = folder / "bin"
        programs.mkdir()
        (programs / "valkey-server").symlink_to(_shipped_program())
        self._base = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("GPUFLOW_", "REDIS_"))},
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "RESULTS_DIR": str(folder / "results"),  # those of the image
            "GPUFLOW_STATE_DIR": str(folder / "state"),
            "GPUFLOW_CACHE_DIR": str(folder / "cache"),
            "PYTHONUNBUFFERED": "1",
            "NO_PROXY": "127.0.0.1",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def start(self, name: str) -> Service:
        """Start a service with what the file says of it."""
        spec = self.compose["services"][name]
        command = [self._here(resolved(word, self._variables), name) for word in spec["command"]]
        if name == "valkey":
            command += ["--port", str(self.ports["valkey"]), "--bind", "127.0.0.1"]
            shutil.copytree(ROOT / "deploy" / "valkey", self.folder / "etc")
            (self.folder / "data").mkdir()
        given = {key: resolved(str(value), self._variables) for key, value in spec["environment"].items()}
        environment = {key: self._here(value, name) for key, value in given.items()}
        extra = {"VALKEY_DATA": str(self.folder / "data")} if name == "valkey" else {}
        if name in self.ports:
            extra["HEALTH_PORT"] = str(self.ports[name])
        self.services[name] = Service(self.folder, name, command, {**self._base, **environment, **extra})
        return self.services[name]

    def _here(self, word: str, name: str) -> str:
        replaced = {
            "/etc/gpuflow/start.sh": str(self.folder / "etc" / "start.sh"),
            "0.0.0.0": "127.0.0.1",
            "--address=0.0.0.0": "--address=127.0.0.1",
            "8080": str(self.ports["gateway"]),
            "--port=5555": f"--port={self.ports['flower']}",
        }
        return replaced.get(word, word).replace("@valkey:6379", f"@127.0.0.1:{self.ports['valkey']}")

    def client(self, user: str | None = "gpuflow", password: str | None = VARIABLES["VALKEY_PASSWORD"]) -> Any:
        return redis.Redis(
            port=self.ports["valkey"],
            username=user,
            password=password,
            decode_responses=True,
            single_connection_client=True,
            retry=Retry(NoBackoff(), 0),
        )

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.ports['gateway']}{path}"

    def close(self) -> None:
        for service in reversed(self.services.values()):
            service.kill()
        self.collector.close()


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    made = Composed(tmp_path_factory.mktemp("composed"))
    try:
        made.start("valkey")

        def answers() -> bool:
            with contextlib.closing(made.client()) as client:
                return bool(client.ping())

        eventually(answers, within=20, what="the broker")
        for name in SERVICES:
            made.start(name)
        yield made
    finally:
        made.close()


def test_a_task_runs_through_the_services(composed: Composed) -> None:
    # Given services that come up, the worker last
    def is_up() -> bool:
        for one in composed.services.values():
            assert one.process.poll() is None, f"{one.name} has ended:\n{one.log_path.read_text()[-3000:]}"
        return status_of(composed.url("/health")) == 200

    eventually(is_up, within=60, what="the gateway")
    # When a task is submitted over HTTP
    task = {"taskType": "echo", "echo": {"output": "hello"}}
    answer = httpx.post(composed.url("/api/v1/tasks"), headers=HEADERS, json=task)
    assert answer.is_success, answer.text
    at = composed.url(f"/api/v1/tasks/{answer.json()['id']}")
    # Then it succeeds, and says what it has used and cost
    done = eventually(
        lambda: (one := httpx.get(at, headers=HEADERS).json())["state"] == "SUCCEEDED" and one,
        within=90,
        what="its end",
    )
    assert done["usage"]["seconds"] > 0
    assert done["usage"]["cost"] > 0

    # And the metrics have it
    def metrics() -> dict[str, float]:
        text = httpx.get(composed.url("/metrics"), headers=HEADERS).text
        found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return {f"{one.name} {' '.join(sorted(one.labels.values()))}".strip(): one.value for one in found}

    def all_there() -> dict[str, float] | None:
        found = metrics()
        workers = found["gpuflow_workers IDLE"] + found["gpuflow_workers BUSY"]
        return found if found.get("gpuflow_tasks_total SUCCEEDED cpu echo") == workers == 1 else None

    found = eventually(all_there, what="the task and its worker in the metrics")
    assert found["gpuflow_broker_aof_enabled"] == 1

    # And the collector has its trace, from the gateway to the worker
    def whole_trace() -> set[tuple[str, str]] | None:
        spans = composed.collector.of(answer.json()["id"])
        names = {(one.name, one.service) for one in spans}
        wanted = {("submit echo", "gpuflow-gateway"), ("attempt echo", "gpuflow-worker"), ("commit", "gpuflow-worker")}
        return names if names >= wanted and len({one.trace for one in spans}) == 1 else None

    eventually(whole_trace, within=30, what="the trace of the task")


def test_the_doctor_of_each_service_has_an_answer_of_the_collector(composed: Composed) -> None:
    for name in SERVICES:
        run = subprocess.run(
            ["gpuflow", "doctor", "--json"],
            env=composed.services[name].environment,
            cwd=composed.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        (found,) = (one for one in json.loads(run.stdout)["checks"] if one["name"] == "traces")
        assert (found["status"], composed.collector.url in found["detail"]) == ("ok", True), (name, found)


def test_each_check_of_health_is_content(composed: Composed) -> None:
    for name in SERVICES:
        service = composed.services[name]
        kind = "worker" if name == "worker-cpu" else name
        eventually(lambda service=service, kind=kind: service.health(kind), within=60, what=f"the health of {name}")
    assert not composed.services["gateway"].health("flower"), "a service that does not answer is not well"


def test_what_restarts_a_worker_does_not_for_a_broker_that_is_away(
    composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = composed.services["worker-cpu"]
    eventually(lambda: worker.health("worker-lives"), within=60, what="the worker's heartbeat")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
    monkeypatch.setitem(worker.environment, "REDIS_URL", nobody)
    assert worker.health("worker-lives") and not worker.health("worker")
    # Another fleet of the same server, which has no worker: the broker answers that there is none.
    monkeypatch.undo()
    monkeypatch.setitem(worker.environment, "GPUFLOW_KEY_PREFIX", "other:")
    assert not worker.health("worker-lives")


def test_flower_asks_for_its_login(composed: Composed) -> None:
    url = f"http://127.0.0.1:{composed.ports['flower']}/workers"
    assert eventually(lambda: status_of(url), within=60, what="Flower") == 401
    assert httpx.get(url, auth=("gpuflow", VARIABLES["FLOWER_PASSWORD"])).status_code == 200


def test_the_broker_lets_in_who_has_the_password(composed: Composed) -> None:
    for login in ((None, None), ("gpuflow", "wrong"), ("default", "")):
        with pytest.raises(redis.AuthenticationError):
            composed.client(*login)
    with contextlib.closing(composed.client()) as client:
        assert client.info("persistence")["aof_enabled"] == 1
        for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("KEYS", "*"), ("SHUTDOWN",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
    users = composed.folder / "data" / "users.acl"
    assert VARIABLES["VALKEY_PASSWORD"] not in users.read_text() and users.stat().st_mode & 0o077 == 0


def test_the_worker_drains_on_sigterm_with_the_time_of_its_command_line(composed: Composed) -> None:
    worker = composed.services["worker-cpu"]
    assert worker.stop() == 0
    log = worker.log_path.read_text("utf-8")
    # worker_soft_shutdown_timeout, GPUFLOW_NOTICE_SEC, GPUFLOW_GRACE_SEC and the margin
    assert re.search(r"event=draining .*deadline_seconds=102\.0", log), log[-2000:]


def test_valkey_does_not_start_without_a_password(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "VALKEY_DATA": str(tmp_path)}
    run = subprocess.run(
        ["sh", str(ROOT / "deploy" / "valkey" / "start.sh")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0 and "VALKEY_PASSWORD is not set" in run.stderr
    assert not list(tmp_path.iterdir())


def test_valkey_takes_the_former_password_while_it_is_set(tmp_path: Path) -> None:
    server = tmp_path / "bin" / "valkey-server"
    server.parent.mkdir()
    server.write_text('#!/bin/sh\nenv | grep -c "^VALKEY_PASSWORD"\n')
    server.chmod(0o755)
    data = tmp_path / "data"
    data.mkdir()
    added = "user gpuflow-gateway-main on #0123 ~t1:* -@all +ping\n"
    for former, count in ((None, 1), ("", 1), ("the-former-one", 2)):
        environment = {
            "PATH": f"{server.parent}:{os.environ['PATH']}",
            "VALKEY_DATA": str(data),
            "VALKEY_PASSWORD": "new",
        }
        environment |= {} if former is None else {"VALKEY_PASSWORD_OLD": former}
        run = subprocess.run(
            ["sh", str(ROOT / "deploy" / "valkey" / "start.sh")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.stdout.strip() == "0", "the server itself knows no password"
        users = (data / "users.acl").read_text()
        assert (added in users) == (former is not None), "a user that was added is gone, or was never there"
        assert users.count("user gpuflow ") == users.count("user default ") == 1
        (data / "users.acl").write_text(users.replace(added, "") + added)
        digests = re.findall(r"#([0-9a-f]{64})", users)
        assert len(digests) == count and digests[0] == hashlib.sha256(b"new").hexdigest()
    assert digests[1] == hashlib.sha256(b"the-former-one").hexdigest()
