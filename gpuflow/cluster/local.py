"""The local cluster itself: its parts, when it is ready, what happens when a part ends, and how all of it ends.

Used by the command line. The caller calls `tend()` about once a second while it waits, so that a part that has ended is
brought back; there is no thread that does it behind the caller's back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import redis
from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.retry import Retry

from gpuflow.broker.embedded import EmbeddedServer
from gpuflow.broker.keys import Keys
from gpuflow.broker.waiting import until_reached
from gpuflow.cluster import commands
from gpuflow.cluster.process import ManagedProcess
from gpuflow.errors import BrokerUnavailable, GPUFlowError
from gpuflow.filelocks import try_lock
from gpuflow.fleet.hardware import probe
from gpuflow.fleet.identity import fleet_id, fleet_tag
from gpuflow.fleet.registry import Fleet
from gpuflow.gateway.login import TOKEN_VARIABLE, URL_VARIABLE, login_of_another, make_login, remove_login
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.scaling.provisioners import ProvisionerError
from gpuflow.scaling.provisioners.local import LocalProcesses
from gpuflow.settings import Settings, mask_url

#: How long the workers have to register, in seconds.
READY_SECONDS: Final = 90.0
#: A part that lived so long starts again at once; below, each time it ends doubles the wait, in seconds.
_STABLE_SECONDS: Final = 60.0
_LONGEST_WAIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05
_KEPT_LOGS: Final = 40


@dataclass(kw_only=True)
class _Part:
    """One process of the cluster, and how often it has ended in short order."""

    name: str
    argv: list[str]
    stop_signals: tuple[tuple[int, float], ...]
    is_worker: bool = False
    port: int | None = None
    process: ManagedProcess | None = None
    ended: int = 0
    start_at: float = 0.0


class LocalCluster:
    """A context manager: inside it the cluster runs, after it nothing of it is left (its data stay on disk).

    The broker is that of REDIS_URL, else the embedded one. `note` gets a line for people when something happens.
    `include`: modules with functions of a team, which its workers are to have.
    `most_launched`: how many more workers beat may launch as the backlog grows.
    `most_ends`: how often a part may end in short order before `tend` raises (None: never).
    `follow`: start every part again when an embedded server on a port comes back with another password; the caller
    keeps no address of it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        workers: int = 1,
        max_jobs: int | None = None,
        include: Sequence[str] = (),
        beat: bool = False,
        most_launched: int = 0,
        flower_port: int | None = None,
        gateway_port: int | None = None,
        most_ends: int | None = None,
        follow: bool = False,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.url = settings.redis_url or ""
        self._settings = settings
        self._server: EmbeddedServer | None = None
        if not settings.redis_url:
            self._server = EmbeddedServer(settings.state_dir, program=settings.valkey_server)
        self._workers = workers
        self._max_jobs = max_jobs
        self._include = tuple(include)
        self._beat = beat
        self._most_launched = most_launched
        self._flower_port = flower_port
        self._gateway_port = gateway_port
        self._most_ends = most_ends
        self._follows = follow
        self._note = note
        self._parts: list[_Part] = []
        self._login: dict[str, str] = {}
        self._joined = False  # to the gateway of another command, whose login ours is
        self._launching: int | None = None  # a lock: whose launched workers those of the state folder are
        self._client: redis.Redis | None = None
        #: The tag of this fleet's machines, as it was last read.
        self._tag = ""

    @property
    def settings(self) -> Settings:
        """The settings, with the address of this cluster's broker, and the login of its gateway."""
        found: dict[str, object] = {"redis_url": self.url}
        if self._login and self._takes_login:
            found |= {"gateway_url": self._login[URL_VARIABLE], "worker_token": SecretStr(self._login[TOKEN_VARIABLE])}
        return self._settings.model_copy(update=found)

    @property
    def embedded(self) -> bool:
        """Whether the broker is the embedded one."""
        return self._server is not None

    @property
    def worker_ids(self) -> list[str]:
        """The ids of its workers."""
        return [part.name for part in self._parts if part.is_worker]

    @property
    def logs(self) -> Path:
        """The folder of its logs."""
        return self._settings.state_dir / "logs"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except KeyboardInterrupt:
            self.kill()
            raise

    def start(self) -> None:
        """Start the broker and every part. Raises BrokerUnavailable, GPUFlowError."""
        if self._server is not None:
            self.url = self._server.start()
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        _prune(self.logs)
        self._log_in()
        self._client = _client_of(self.url)
        if self._server is None:
            self._reach()
        self._end_launched()  # by a cluster that was killed: they have its token, and may have its broker
        self._parts = self._plan()
        for part in self._parts:
            self._launch(part)

    @property
    def _takes_login(self) -> bool:
        """Whether workers and clients have no gateway of the user's: the token of ours goes to no other."""
        return self._settings.gateway_url is None

    def _log_in(self) -> None:
        """Join the gateway of another command on the same embedded server, else make a login for our own."""
        asked = self._settings.worker_token is None and self._takes_login
        joined = login_of_another(self._settings.state_dir) if asked and self.embedded else {}
        self._joined = bool(joined)
        if joined:
            self._login = joined
        elif self._gateway_port is not None:
            self._login = make_login(self._settings, self._gateway_port)

    def _reach(self) -> None:
        """Wait for a broker that is away, as every command does. Raises BrokerUnavailable."""

        def ping() -> None:
            try:
                if self._client is not None:
                    self._client.ping()
            except redis.RedisError as error:
                raise BrokerUnavailable(
                    f"the broker {mask_url(self.url)} cannot be used ({error}); check REDIS_URL, "
                    "or unset it for the embedded one"
                ) from error

        until_reached(ping, self._settings.submit_timeout_seconds, self._note)

    def wait_ready(self, deadline_seconds: float = READY_SECONDS) -> None:
        """Wait until every worker is registered and serves, and the gateway answers.

        Raises GPUFlowError with the end of the log otherwise.
        """
        give_up_at = time.monotonic() + deadline_seconds
        waiting = [part for part in self._parts if part.is_worker or part.port]
        while waiting:
            waiting = [part for part in waiting if not (_answers(part.port) if part.port else self._serves(part.name))]
            for part in waiting:
                process = part.process
                if process is None or not process.alive:
                    raise _ended(part)
                if time.monotonic() > give_up_at:
                    raise GPUFlowError(f"{part.name} is not ready within {deadline_seconds:g} s; see {process.log}")
            if waiting and waiting[0].process is not None:
                waiting[0].process.wait(_POLL_SECONDS)

    def tend(self) -> None:
        """Bring back what has ended. Raises GPUFlowError when a part ends too often, or the broker cannot come back."""
        self._tend_server()
        self._tend_login()
        for part in self._parts:
            process = part.process
            if process is not None and not process.alive:
                lived = time.monotonic() - process.started_at
                part.ended = 1 if lived > _STABLE_SECONDS else part.ended + 1
                part.process = None
                if self._most_ends is not None and part.ended > self._most_ends:
                    part.process = process
                    raise _ended(part)
                wait = min(_LONGEST_WAIT_SECONDS, 0.5 * 2 ** (part.ended - 1))
                part.start_at = time.monotonic() + wait
                code = process.exit_code
                self._note(f"{part.name} ended (exit code {code}); it starts again in {wait:g} s; see {process.log}")
            if part.process is None and time.monotonic() >= part.start_at:
                self._launch(part)

    def stop(self) -> None:
        """End everything: what runs goes back to its queue, data are written. May be called twice."""
        processes = [part.process for part in reversed(self._parts) if part.process is not None]
        for process in processes:
            process.ask()
        for process in processes:
            process.stop()
        self._end_launched()
        self._leave()
        if self._server is not None:
            self._server.stop()

    def kill(self) -> None:
        """End everything at once; the broker still writes its data."""
        for part in self._parts:
            if part.process is not None:
                part.process.kill()
        self._end_launched()
        self._leave()
        if self._server is not None:
            self._server.stop()

    def _plan(self) -> list[_Part]:
        settings = self._settings
        quick = ((signal.SIGTERM, 5.0),)
        # SIGQUIT is Celery's cold stop: children are stopped, their messages go back to their queues.
        cold = ((signal.SIGQUIT, settings.grace_seconds + 5.0), (signal.SIGTERM, 2.0))
        name = settings.worker_id or f"local-{uuid.uuid4().hex[:8]}"
        uuids = [gpu.uuid for gpu in probe().gpus] if self._workers > 1 else []
        parts = []
        for number, gpus in enumerate(commands.share_gpus(uuids, self._workers), 1):
            worker_id = name if self._workers == 1 else f"{name}-{number}"
            argv = commands.worker_command(
                worker_id,
                log_level=settings.log_level,
                max_jobs=self._max_jobs,
                gpus=gpus,
                include=self._include,
            )
            parts.append(_Part(name=worker_id, argv=argv, stop_signals=cold, is_worker=True))
        if self._beat:
            parts.append(_Part(name="beat", argv=commands.beat_command(settings.log_level), stop_signals=quick))
        if self._gateway_port is not None:
            argv = commands.gateway_command(self._gateway_port)
            ends = ((signal.SIGTERM, settings.grace_seconds + 5.0),)
            parts.append(_Part(name="gateway", argv=argv, stop_signals=ends, port=self._gateway_port))
        if self._flower_port is not None:
            parts.append(_Part(name="flower", argv=commands.flower_command(self._flower_port), stop_signals=quick))
        return parts

    def _launch(self, part: _Part) -> None:
        environment = commands.process_environment(
            self._settings, self.url, os.environ, Path.cwd(), own_broker=self.embedded
        )
        if part.is_worker and self._include:  # as `celery worker` finds them; last, so that they hide nothing
            paths = [environment.get("PYTHONPATH", ""), str(Path.cwd())]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        launches = part.name == "beat" and bool(self._most_launched)
        if part.name == "gateway" or ((part.is_worker or launches) and self._takes_login):
            environment |= self._login  # workers of another gateway send the token of ours to nobody
        if launches:
            environment |= commands.scaling_environment(self._settings, self._most_launched, self._max_jobs)
        if part.name == "flower":
            environment = {**environment, **commands.flower_login(self._settings.state_dir, environment)}
        log = self.logs / (f"worker-{part.name}.log" if part.is_worker else f"{part.name}.log")
        part.process = ManagedProcess(
            part.name,
            part.argv,
            environment=environment,
            folder=self._settings.state_dir,
            log=log,
            stop_signals=part.stop_signals,
        )

    def _tend_server(self) -> None:
        server = self._server
        if server is None or server.alive or EmbeddedServer.running(self._settings.state_dir) == self.url:
            return
        # Ours has crashed, or the process that owned it has ended: the data are there.
        self._note("the embedded server has ended; it starts again")
        url = server.start()
        if url != self.url and not self._follows:
            raise BrokerUnavailable("the embedded server came back at another address; start again, its data are kept")
        if url != self.url:
            self._follow(url)

    def _follow(self, url: str) -> None:
        """Start every part again, with the address of a server that has come back with another password."""
        self.url = url
        if self._client is not None:
            self._client.close()
        self._client = _client_of(url)
        self._end_launched()
        self._restart()

    def _tend_login(self) -> None:
        """Go on with a gateway of our own when the one that we had joined has ended."""
        if not self._joined or self._gateway_port is None or login_of_another(self._settings.state_dir):
            return
        self._note("the gateway of another command has ended; all parts start again, with the one of this")
        self._log_in()
        self._restart()

    def _restart(self) -> None:
        for part in self._parts:
            if part.process is not None:
                part.process.kill()  # without a broker it cannot stop well; what it ran is swept and runs again
            self._launch(part)

    def _serves(self, worker_id: str) -> bool:
        try:
            entry = self._fleet().find(worker_id)
        except redis.RedisError:
            return False
        return entry is not None and not entry.is_gone and CONTROL_QUEUE in entry.queues

    def _end_launched(self) -> None:
        """End the workers that beat has launched; they are no children of ours. Not those of another cluster."""
        if not self._most_launched or not self._owns_launched():
            return
        if self._client is not None:
            keys = Keys(self._settings.key_prefix)
            with contextlib.suppress(redis.RedisError, GPUFlowError):
                self._tag = fleet_tag(fleet_id(self._client, keys), keys)
        if not self._tag:
            return
        launched = LocalProcesses(self._settings, self.url, self._tag)
        with contextlib.suppress(ProvisionerError):
            for worker_id in launched.machines():
                launched.terminate(worker_id)
                if self._client is not None:
                    with contextlib.suppress(redis.RedisError):
                        self._fleet().leave(worker_id)

    def _owns_launched(self) -> bool:
        """Say whether the launched workers of the state folder are ours: no other cluster that launches lives."""
        if self._launching is None:
            path = self._settings.state_dir / "machines" / ".cluster"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError:
                return False
            if not try_lock(descriptor):
                os.close(descriptor)
                return False
            self._launching = descriptor
        return True

    def _leave(self) -> None:
        """Take our workers out of the registry, those too that were killed; the token of our gateway is void."""
        if self._login and not self._joined:
            remove_login(self._settings.state_dir, self._login)
        if self._launching is not None:
            os.close(self._launching)
            self._launching = None
        if self._client is None:
            return
        with contextlib.suppress(redis.RedisError):
            for worker_id in self.worker_ids:
                self._fleet().leave(worker_id)
        self._client.close()
        self._client = None

    def _fleet(self) -> Fleet:
        assert self._client is not None  # noqa: S101  (set by start, before any part runs)
        return Fleet(self._client, Keys(self._settings.key_prefix))


def _client_of(url: str) -> redis.Redis:
    return redis.Redis.from_url(
        url, decode_responses=True, socket_connect_timeout=2, socket_timeout=5, retry=Retry(NoBackoff(), 0)
    )


def _answers(port: int) -> bool:
    """Whether somebody listens on a port of this machine's loopback."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _ended(part: _Part) -> GPUFlowError:
    process = part.process
    if process is None:
        return GPUFlowError(f"{part.name} is not there")
    tail = process.log_tail()
    return GPUFlowError(
        f"{part.name} ended with exit code {process.exit_code}; see {process.log}" + (f"\n{tail}" if tail else "")
    )


def _prune(folder: Path) -> None:
    """Keep the newest logs."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in logs[_KEPT_LOGS:]:
        path.unlink(missing_ok=True)
