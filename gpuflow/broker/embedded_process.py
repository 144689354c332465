"""The process of the embedded server: how it is started, when it is ready, how it ends.

Used by `gpuflow.broker.embedded`. The server must not outlive the process that started it, not even
after kill -9. On Linux the kernel sees to that (PR_SET_PDEATHSIG), with two traps that this file closes:
the signal is sent when the *thread* that started the child ends, so a thread of its own starts the server
and waits for it; and a parent that dies before the child has asked for the signal is missed, so the child
looks once more who its parent is. Other systems have no such signal: there the server stays until it is
stopped, and the next start finds it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gpuflow.errors import BrokerUnavailable

#: Runs in the child before it becomes the server: ask for SIGTERM (a clean stop) when the parent dies, then exec.
_EXEC_WITH_PARENT: Final = """
import ctypes, os, sys
parent, program = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, 15, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(3)
try:
    os.execv(program[0], program)
except OSError as error:
    sys.exit(f"cannot run {program[0]}: {error.strerror}; set GPUFLOW_VALKEY_SERVER to a valkey-server")
"""

_POLL_SECONDS: Final = 0.01
#: How long one question to the server may take.
_PING_SECONDS: Final = 1.0
#: How long the former port is waited for.
_PORT_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class SocketAddress:
    """The Unix socket of a server, in a folder that this user alone may enter."""

    path: Path

    @property
    def url(self) -> str:
        """The address as REDIS_URL takes it."""
        return f"unix://{quote(os.fsencode(self.path))}?db=0"


@dataclass(frozen=True, kw_only=True)
class PortAddress:
    """A port of 127.0.0.1, which every local user can reach, and the password of the server there."""

    port: int
    password: str = field(repr=False)

    @property
    def url(self) -> str:
        """The address as REDIS_URL takes it."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"


class ServerProcess:
    """A running valkey-server, and the thread that started it and waits for it."""

    def __init__(self, program: Path, config: str, folder: Path, log: Path, inherit: int) -> None:
        """Start the server in `folder`. Raises BrokerUnavailable when the program cannot be started.

        The configuration goes through stdin, so that the password is in no command line and in no file.
        `inherit` is the descriptor of the lock that the server holds as long as it lives.
        """
        self._started = threading.Event()
        self._ended = threading.Event()
        self._error: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self.exit_code: int | None = None
        arguments = (program, config, folder, log, inherit)
        threading.Thread(target=self._keep, args=arguments, name="gpuflow-embedded", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            raise BrokerUnavailable(
                f"cannot start {program}: {self._error.strerror or self._error}; "
                "set GPUFLOW_VALKEY_SERVER to a valkey-server, or REDIS_URL to a running one"
            ) from self._error

    def _keep(self, program: Path, config: str, folder: Path, log: Path, inherit: int) -> None:
        command = [sys.executable, "-I", "-S", "-c", _EXEC_WITH_PARENT, str(os.getpid()), str(program), "-"]
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=folder,
                    pass_fds=(inherit,),
                    start_new_session=True,
                )
        except OSError as error:
            self._error = error
            self._started.set()
            self._ended.set()
            return
        self._process, self.pid = process, process.pid
        self._started.set()
        try:
            process.communicate(config.encode())
        finally:
            self.exit_code = process.wait()
            self._ended.set()

    @property
    def alive(self) -> bool:
        """Whether the server still runs."""
        return not self._ended.is_set()

    def stop(self, grace_seconds: float) -> None:
        """Ask the server to end (it writes all data first), and kill it when it has not by the deadline."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process is not None:
                self._process.send_signal(number)
            if self._ended.wait(grace_seconds):
                return


def make_config(address: SocketAddress | PortAddress) -> str:
    """Return the server's configuration: this machine alone, nothing lost, nothing evicted."""
    doors: tuple[str, ...]
    if isinstance(address, SocketAddress):
        # The folder keeps other users out; there is no port that anybody could take over.
        doors = ("port 0", f"unixsocket {_quoted(str(address.path))}", "unixsocketperm 700")
    else:
        doors = ("bind 127.0.0.1", f"port {address.port}", "protected-mode yes", f'requirepass "{address.password}"')
    return "\n".join(
        (
            *doors,
            "daemonize no",
            "dir ./",
            "appendonly yes",
            "appendfsync everysec",
            "aof-load-truncated yes",
            'save ""',
            "maxmemory-policy noeviction",
            "tcp-backlog 128",
            "",
        )
    )


def _quoted(text: str) -> str:
    """Return a text as the server's configuration takes it, whatever bytes it has."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in os.fsencode(text)) + '"'


def free_port(preferred: int | None) -> int:
    """Return a free port of 127.0.0.1: the preferred one if it is free, or becomes so within half a second.

    A server that was killed may hold its port for a moment longer, until its last thread is gone.
    """
    give_up_at = time.monotonic() + _PORT_SECONDS
    while preferred is not None and time.monotonic() < give_up_at:
        if _bindable(preferred) is not None:
            return preferred
        time.sleep(_POLL_SECONDS)
    port = _bindable(0)
    if port is None:
        raise BrokerUnavailable("no port of 127.0.0.1 is free for the embedded server; close some connections")
    return port


def _bindable(port: int) -> int | None:
    """Return the port if it can be bound (0 = any), else None."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def ping(pid: int, address: SocketAddress | PortAddress) -> bool:
    """Whether the server of this process answers there, and be it that it is busy.

    A port is asked first whose it is: the password is sent to no other process, which may have taken the port of a
    server that has crashed, or that has not begun to listen yet. Raises redis.BusyLoadingError while it loads.
    """
    if isinstance(address, PortAddress) and not listens(pid, address.port):
        return False
    client = redis.Redis.from_url(
        address.url,
        socket_connect_timeout=_PING_SECONDS,
        socket_timeout=_PING_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        return bool(client.ping())
    except redis.BusyLoadingError:
        raise
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
    except redis.RedisError:
        return False
    finally:
        client.close()


def listens(pid: int, port: int) -> bool:
    """Say whether that very process listens on the port of 127.0.0.1."""
    try:
        found = psutil.Process(pid).net_connections(kind="tcp4")
    except psutil.Error:
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr == ("127.0.0.1", port) for each in found)


def wait_until_ready(process: ServerProcess, address: SocketAddress | PortAddress, deadline_seconds: float) -> bool:
    """Wait for the first answer; False when the server has ended or did not answer in time.

    Reading a large append-only file may take long: while the server says that it is loading, the deadline
    moves on.
    """
    give_up_at = time.monotonic() + deadline_seconds
    while process.alive and time.monotonic() < give_up_at:
        try:
            if ping(process.pid, address):
                return process.alive
        except redis.BusyLoadingError:
            give_up_at = time.monotonic() + deadline_seconds
        time.sleep(_POLL_SECONDS)
    return False
