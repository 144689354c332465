"""The process that forks shims for this worker: started at the first child, started again if it is gone.

It ends when the worker closes its socket or dies; shims that run then are told by their own pipes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

_SHIM: Final = str(Path(__file__).with_name("shim.py"))
#: The forking process answers within this time, or it is taken for dead.
_ANSWER_SECONDS: Final = 20.0


class Spawner:
    """Forks shims. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(
        self,
        argv: Sequence[str],
        cwd: Path,
        descriptors: Sequence[int],
        *,
        at_end: Sequence[str] = (),
        confined: Mapping[str, Any] | None = None,
    ) -> int:
        """Start a shim that runs `argv` in `cwd`; return its process id. Raises OSError.

        `descriptors` are stdin, stdout, stderr, control, status, environment, and any to be held open; `at_end` is a
        command that the shim runs when nothing of the tree is left; `confined` what the child may not (`shim`).
        """
        message = json.dumps(
            {"argv": list(argv), "cwd": str(cwd), "at_end": list(at_end), "confined": dict(confined or {})}
        ).encode()
        with self._lock:
            try:
                return self._ask(message, descriptors)
            except OSError:
                self._close()
                return self._ask(message, descriptors)

    def _ask(self, message: bytes, descriptors: Sequence[int]) -> int:
        if self._socket is None:
            self._start()
        if self._socket is None:
            raise OSError("the process that starts children could not be started")
        socket.send_fds(self._socket, [message], list(descriptors))
        answer = self._socket.recv(64)
        if not answer:
            raise OSError("the process that starts children has gone")
        return int(answer)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _SHIM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(_ANSWER_SECONDS)
        self._socket = ours

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
            self._process = None


@cache
def spawner() -> Spawner:
    """Return the spawner of this process."""
    return Spawner()
