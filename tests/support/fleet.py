"""Real brokers and real worker processes for tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import redis

from gpuflow.broker.embedded import EmbeddedServer
from gpuflow.broker.embedded_files import ServerFiles
from gpuflow.celery_app import GPUFlow
from gpuflow.fleet.registry import Fleet, WorkerState
from gpuflow.settings import Settings
from tests.gate import leftovers
from tests.support.memory_disk import memory_folder
from tests.support.waiting import BrokenPromise, eventually, patient

ROOT = Path(__file__).resolve().parents[2]
#: Stands before two libraries that Celery loads at each start, for other commands than `worker`: a sixth of that start.
_WITHOUT_EXTRAS: Final = ROOT / "tests" / "support" / "without_extras"
#: What has to be free on the disk in memory for a broker to write there. A server keeps an acknowledged write to itself
#: while an fsync runs, so that kill -9 loses it on a disk that other tests keep busy, which no test is about.
_BROKER_MIB: Final = 1024
#: What has a log: the workers, gateways and brokers that run or ran in this test process.
_with_logs: weakref.WeakSet[Any] = weakref.WeakSet()


def log_paths() -> list[Path]:
    """Return the logs of what the tests have started and not yet let go."""
    return sorted(one.log_path for one in _with_logs if one.log_path.is_file())


def keep_log(of: Any) -> None:
    """Put the log of this (`log_path`) into the report of a test that fails."""
    _with_logs.add(of)


class Broker:
    """A real server with an append-only file, on loopback; the file is in memory where the machine has /dev/shm."""

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(memory_folder("broker", folder, free_mib=_BROKER_MIB))
        self.folder = folder
        self.data = folder / "embedded" / "data"
        # On a port of loopback, for proxies, and with one password, so that it comes back at its former address.
        self.server = EmbeddedServer(folder, fixed_password=secrets.token_urlsafe(32))
        self.log_path = ServerFiles(folder).log
        keep_log(self)
        self.url = self.server.start()
        self.client: Any = redis.Redis.from_url(self.url, decode_responses=True)

    def kill(self) -> None:
        """End the server as a crash would: SIGKILL."""
        record = ServerFiles(self.folder).read_record()
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        eventually(lambda: not self.server.alive, within=10, what="the end of the killed server")

    def restart(self) -> None:
        """Start the server again, at its former address."""
        assert self.server.start() == self.url, "the server has come back at another address"

    def snapshot(self) -> Path:
        """Copy the append-only files as they are now, and return the copy."""
        copy = self.folder / f"snapshot-{len(list(self.folder.glob('snapshot-*')))}"
        shutil.copytree(self.data, copy)
        return copy

    def restart_from(self, snapshot: Path) -> None:
        """Kill the server and start it again from an older copy of its files."""
        self.kill()
        shutil.rmtree(self.data)
        shutil.copytree(snapshot, self.data)
        self.restart()

    def close(self) -> None:
        with self._stack:
            self.client.close()
            self.server.stop()


class WorkerProcess:
    """One `celery -A gpuflow worker` process."""

    def __init__(
        self,
        url: str,
        folder: Path,
        name: str,
        *options: str,
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.url = url
        self.log_path = folder / f"{name}.log"
        keep_log(self)
        environment = {
            **os.environ,
            "REDIS_URL": url,
            "RESULTS_DIR": str(folder / "results"),
            "GPUFLOW_LOCK_DIR": str(folder / "locks"),
            "GPUFLOW_STATE_DIR": str(folder / "state"),
            "GPUFLOW_CACHE_DIR": str(folder / "cache"),
            "GPUFLOW_GRACE_SEC": "1",
            # Tests of what a closed worker refuses set these to none and "".
            "GPUFLOW_ALLOW_CODE": "all",
            "GPUFLOW_ALLOW_SECRETS": "*",
            "GPUFLOW_READ_ROOTS": f"{folder},{tempfile.gettempdir()},/dev/shm,/models,/nowhere,/there",
            "GPUFLOW_WRITE_ROOTS": f"{folder},{tempfile.gettempdir()},/dev/shm",
            "GPUFLOW_ALLOW_HOSTS": "127.0.0.0/8,::1",
            "GPUFLOW_ALLOW_BUCKETS": "*",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]),
            **(env or {}),
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(_WITHOUT_EXTRAS), environment["PYTHONPATH"]])
        passed = (environment.get("GPUFLOW_PASS_ENV"), leftovers.VARIABLE)
        environment["GPUFLOW_PASS_ENV"] = ",".join(filter(None, passed))
        folder.mkdir(parents=True, exist_ok=True)
        self.settings = Settings.load(env=environment, cwd=folder)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *launcher,
                    sys.executable,
                    "-m",
                    "celery",
                    "-A",
                    "gpuflow",
                    "worker",
                    "-l",
                    "INFO",
                    "--name",
                    name,
                    *options,
                ],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def supervised(self) -> list[psutil.Process]:
        """Return the child processes of the attempts that run here, without their shims.

        What a child starts looks like the child until it has executed its own program.
        """
        found = []
        for process in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.cmdline()[-2:] == ["-m", "executors"]:
                    found.append((process, process.ppid()))
        ids = {process.pid for process, _ in found}
        return [process for process, parent in found if parent not in ids]

    def ready(self, within: float = 60) -> WorkerProcess:
        app = GPUFlow("probe", settings=self.settings)
        fleet = Fleet(app.redis, app.keys)

        def registered() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"worker {self.name} ended with {self.process.returncode}:\n{self.log()[-3000:]}")
            entry = fleet.find(self.name)
            return entry is not None and entry.pid == self.pid and entry.state in (WorkerState.IDLE, WorkerState.BUSY)

        eventually(registered, within=within, what=f"worker {self.name} in the registry")
        app.redis.close()
        return self

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self, within: float = 30) -> int:
        """Ask for a warm stop and wait for the end."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=patient(within))

    def close(self) -> None:
        """End the process and everything it started."""
        left = self.children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)  # a stopped process does not hear the next one
            self.process.send_signal(signal.SIGQUIT)
            try:
                self.process.wait(timeout=patient(5))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout=patient(30))
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


class TestFleet:
    """A broker, an app that talks to it, and the workers that a test starts; everything ends with the test.

    `options` are given to every worker. `broker`: another server than the embedded one.
    """

    __test__ = False

    def __init__(
        self, folder: Path, env: Mapping[str, str] | None = None, options: Sequence[str] = (), broker: Any = None
    ) -> None:
        self.folder = folder
        self.env = dict(env or {})
        self.options = tuple(options)
        self.broker = broker or Broker(folder / "broker")
        self.settings = Settings.load(
            env={
                "REDIS_URL": self.broker.url,
                "RESULTS_DIR": str(folder / "results"),
                "GPUFLOW_STATE_DIR": str(folder / "state"),
                **self.env,
            },
            cwd=folder,
        )
        self.app = GPUFlow("gpuflow", settings=self.settings)
        self.registry = Fleet(self.app.redis, self.app.keys)
        self.workers: list[WorkerProcess] = []

    @property
    def results(self) -> Path:
        return self.settings.results_dir

    def start_worker(self, name: str = "w1", *options: str, env: Mapping[str, str] | None = None) -> WorkerProcess:
        return self.spawn_worker(name, *options, env=env).ready()

    def spawn_worker(self, name: str, *options: str, env: Mapping[str, str] | None = None) -> WorkerProcess:
        """Start a worker without waiting for it, with the fleet's environment and then `env`."""
        worker = WorkerProcess(
            self.settings.redis_url or "",
            self.folder,
            name,
            *self.options,
            *options,
            env={**self.env, **(env or {})},
        )
        self.workers.append(worker)
        return worker

    def echo(self, **fields: Any) -> dict[str, Any]:
        return {"taskType": "echo", "echo": fields}

    @contextlib.contextmanager
    def hasty_client(self) -> Iterator[GPUFlow]:
        """An app whose submits give up after a second."""
        app = GPUFlow("hasty", settings=self.settings.model_copy(update={"submit_timeout_seconds": 1.0}))
        try:
            yield app
        finally:
            app.close()
            app.redis.close()

    def state(self, task_id: str) -> str:
        record = self.app.ledger.find(task_id)
        return str(record.state) if record else "UNKNOWN"

    def close(self) -> None:
        """End everything. What one part raises keeps no other part from its end."""
        with contextlib.ExitStack() as stack:  # the last one first
            stack.callback(self.broker.close)
            stack.callback(self.app.redis.close)
            stack.callback(self.app.close)
            stack.callback(self.app.backend.result_consumer.stop)
            for worker in self.workers:
                stack.callback(worker.close)


def running(pids: Sequence[int]) -> list[int]:
    """Return those of the processes that still run (a zombie does not)."""
    alive = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
        except psutil.NoSuchProcess:
            continue
    return alive


def gone(pids: Sequence[int], what: str = "every process of the tree gone") -> None:
    """Wait until none of the processes runs. One that still does so long after is an orphan: a broken promise."""
    try:
        eventually(lambda: not running(pids), within=60, what=what)
    except AssertionError as error:
        raise BrokenPromise(str(error)) from None
