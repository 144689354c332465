"""The files of the embedded server: who runs it, at which address, with which password, and the locks.

Used by `gpuflow.broker.embedded`. All lie in one folder that only this user may enter:

    server.json     who serves now (written by rename, removed on a clean stop)
    server.sock     the Unix socket of the server, where the platform and the length of the path allow one
    password        of a server on a port of loopback: another one at each start
    start.lock      held while somebody starts or stops the server
    server.lock     held by the server process itself as long as it lives, so two never share the data
    data/           the append-only files
    server.log      the server's log, turned once at start when it has grown large
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import psutil

from gpuflow.errors import BrokerUnavailable
from gpuflow.filelocks import try_lock
from gpuflow.private_files import read_secret, write_private

#: Schema number of server.json.
RECORD_SCHEMA: Final = 1
#: A log larger than this is renamed to server.log.1 at start, in bytes.
MAX_LOG_BYTES: Final = 5 * 1024 * 1024
#: The longest path of a Unix socket in bytes: with the final zero, macOS takes 104 and Linux 108.
LONGEST_SOCKET_BYTES: Final = 103 if sys.platform == "darwin" else 107
#: Two readings of a process's start may differ by so much, when the system clock is set, in seconds.
_START_TOLERANCE_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.05
#: Not there on Windows.
_CLOSE_ON_EXEC: Final = getattr(os, "O_CLOEXEC", 0)


@dataclass(frozen=True, kw_only=True)
class ServerRecord:
    """The running server: its process (id and start, Unix seconds, so that a reused id is seen) and its port.

    Port 0: it listens on its Unix socket.
    """

    pid: int
    process_started: float
    port: int = 0
    schema: int = RECORD_SCHEMA

    def alive(self) -> bool:
        """Whether that very process still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.process_started) < _START_TOLERANCE_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class ServerFiles:
    """The folder of one embedded server."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "embedded"
        self.data = self.folder / "data"
        self.log = self.folder / "server.log"
        self.socket = self.folder / "server.sock"
        self._record = self.folder / "server.json"
        self._password = self.folder / "password"
        self._server_lock = self.folder / "server.lock"

    def prepare(self) -> None:
        """Make the folders, for this user alone. Raises BrokerUnavailable when that is impossible."""
        with self._explained("make"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "it is no folder of this user")
            self.folder.chmod(0o700)
            self.data.mkdir(mode=0o700, exist_ok=True)
            if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
                self.log.replace(self.log.with_name("server.log.1"))

    def keep_password(self, password: str | None) -> None:
        """Store the password of the server that starts now, readable by this user; None: it needs none."""
        with self._explained("write"):
            if password is None:
                self._password.unlink(missing_ok=True)
            else:
                write_private(self._password, password)

    def can_have_socket(self) -> bool:
        """Say whether the server can listen on its Unix socket; what a former one left of it is removed."""
        if not hasattr(socket, "AF_UNIX") or len(os.fsencode(self.socket)) > LONGEST_SOCKET_BYTES:
            return False
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            self.socket.unlink(missing_ok=True)
            probe.bind(os.fsencode(self.socket))
            self.socket.unlink()
            return True
        return False

    def read_password(self) -> str | None:
        """Return the password, or None when there is none or it may not be read."""
        return read_secret(self._password)

    def read_record(self) -> ServerRecord | None:
        """Return who serves, or None when there is no record or it is damaged."""
        try:
            raw = json.loads(self._record.read_text())
            return ServerRecord(
                pid=int(raw["pid"]), process_started=float(raw["process_started"]), port=int(raw.get("port", 0))
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write_record(self, record: ServerRecord) -> None:
        """Publish who serves."""
        with self._explained("write"):
            write_private(self._record, json.dumps(asdict(record)) + "\n")

    def clear_record(self) -> None:
        """Forget who serves."""
        with self._explained("clean"):
            self._record.unlink(missing_ok=True)

    def log_tail(self, lines: int = 5) -> str:
        """Return the end of the server's log as one line, or an empty text."""
        try:
            text = self.log.read_text(errors="replace")[-4000:]
        except OSError:
            return ""
        return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())

    @contextmanager
    def starting(self, deadline_seconds: float) -> Iterator[None]:
        """Hold start.lock, so that of several who start or stop at once one goes after the other."""
        with self._explained("lock"):
            lock = _Lock.open(self.folder / "start.lock")
        with lock:
            pass_at = time.monotonic() + deadline_seconds
            while not lock.acquire():
                if time.monotonic() > pass_at:
                    raise BrokerUnavailable(
                        f"another process has been starting the embedded server in {self.folder} for "
                        f"{deadline_seconds:g} s; see {self.log}"
                    )
                time.sleep(_POLL_SECONDS)
            yield

    def take_data(self, deadline_seconds: float) -> _Lock:
        """Return server.lock, taken, to be inherited by the server.

        Raises BrokerUnavailable when a server that is in no record still holds the data at the deadline.
        """
        with self._explained("lock"):
            lock = _Lock.open(self._server_lock)
        pass_at = time.monotonic() + deadline_seconds
        while not lock.acquire():
            if time.monotonic() > pass_at:
                lock.close()
                raise BrokerUnavailable(
                    f"a valkey-server that is in no record still uses {self.data}; "
                    f"find it with `fuser {self._server_lock}` and stop it"
                )
            time.sleep(_POLL_SECONDS)
        return lock

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BrokerUnavailable(
                f"cannot {verb} the files of the embedded server in {self.folder}: {error.strerror or error}; "
                "mend the disk or its permissions, or set GPUFLOW_STATE_DIR to another folder"
            ) from error


class _Lock:
    """An flock on a file. It belongs to the open file: whoever inherits the descriptor holds it too."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open (or make) the file, without taking the lock."""
        return cls(os.open(path, os.O_RDWR | os.O_CREAT | _CLOSE_ON_EXEC, 0o600))

    def acquire(self) -> bool:
        """Take the lock if it is free; says whether it was."""
        return try_lock(self.descriptor)

    def close(self) -> None:
        """Close our descriptor; the lock is free when every process that holds it has closed it."""
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
