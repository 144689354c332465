"""Starts one child process behind its shim and talks to it: request in, lines of events and log out.

Used by the attempt (`worker.attempt`) and by sessions. It knows processes and pipes; not what a task, a record or a
queue is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from gpuflow.protocol import MAX_LINE_BYTES
from gpuflow.worker.cgroups import GroupEnd
from gpuflow.worker.confinement import UNCONFINED, Confinement
from gpuflow.worker.spawner import spawner

_CHUNK_BYTES: Final = 65_536

#: `cut`: a piece of a line of stdout that is too long to be an event.
LineKind = Literal["event", "cut", "log", "tick"]


@dataclass(frozen=True, kw_only=True)
class ChildEnd:
    """How a child ended: its exit code or the signal that ended it, and processes it had left behind.

    `beside` are the requests that were open on its session when that died: any of them may be the cause. `group` is
    what the kernel says of its control group, where it had one.
    """

    exit_code: int | None
    signal: int | None
    stragglers: int = 0
    beside: int = 0
    group: GroupEnd | None = None


class RunningWork(Protocol):
    """What an attempt follows: a child of its own, or one request of a session."""

    @property
    def shim_pid(self) -> int | None:
        """The process that ends only when nothing of the work is left; None while there is none yet."""

    @property
    def held_up_seconds(self) -> float:
        """How long it has waited for others before it could begin; that counts for no time limit."""

    def say(self, word: bytes) -> None:
        """Tell a function something while it runs (`functions.calls`: SOFT_LIMIT, NOTICE)."""

    def notice(self) -> None:
        """Tell it that it is to end soon and to go on elsewhere."""

    def terminate(self) -> None:
        """Ask it to stop."""

    def kill(self) -> None:
        """End it now."""

    def read(self, timeout_seconds: float) -> Iterator[tuple[LineKind, bytes]]:
        """Yield its output until its end, and a tick at least every timeout."""

    def wait(self) -> ChildEnd:
        """Wait for the end, and tell how it was."""


class _Lines:
    """Cuts a byte stream into lines; a line over the limit is handed out in pieces. With each: whether it is one."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._cut = False

    def feed(self, chunk: bytes) -> list[tuple[bytes, bool]]:
        self._rest += chunk
        if b"\n" not in chunk and len(self._rest) < MAX_LINE_BYTES:
            return []
        lines = bytes(self._rest).split(b"\n")
        self._rest = bytearray(lines.pop())
        found = []
        for line in lines:
            found.append((line, self._cut))
            self._cut = False
        if len(self._rest) >= MAX_LINE_BYTES:
            found.append((bytes(self._rest), True))
            self._rest.clear()
            self._cut = True
        return found

    def rest(self) -> list[tuple[bytes, bool]]:
        last, self._rest = bytes(self._rest), bytearray()
        return [(last, self._cut)] if last else []


class Child:
    """One running child. `read()` yields its output until all of its tree has ended.

    `keep_open` are file descriptors that the shim holds until then (lock files), `at_end` a command that it runs before
    it lets go of them, however the child ended. With `talks`, its stdin stays open after the request, for `send`.
    `confinement` is what it may not do.
    Raises OSError when the shim cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        request: str,
        environment: Mapping[str, str],
        cwd: Path,
        keep_open: Sequence[int] = (),
        at_end: Sequence[str] = (),
        talks: bool = False,
        confinement: Confinement = UNCONFINED,
    ) -> None:
        pipes = [os.pipe() for _ in range(6)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][0], pipes[4][1], pipes[5][0]]
        stdin, self._stdout, self._stderr, self._control, self._status, env_write = (
            pipes[0][1],
            pipes[1][0],
            pipes[2][0],
            pipes[3][1],
            pipes[4][0],
            pipes[5][1],
        )
        self._lock = threading.Lock()
        self._group = confinement.group
        self._stdin = stdin if talks else -1
        self._sending = threading.Lock()
        whole = confinement.environment(environment)
        try:
            self.shim_pid = spawner().spawn(
                [*confinement.sandbox, *argv],
                cwd,
                [*theirs, *keep_open],
                environment=whole,
                at_end=at_end,
                confined=confinement.message(),
            )
        except OSError:
            for descriptor in (stdin, self._stdout, self._stderr, self._control, self._status, env_write):
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._feeder = threading.Thread(
            target=self._feed,
            args=(stdin, env_write, whole, request, talks),
            name="gpuflow-feed",
            daemon=True,
        )
        self._feeder.start()

    @staticmethod
    def _feed(stdin: int, env_write: int, environment: Mapping[str, str], request: str, talks: bool) -> None:
        """Write environment and request; a child that reads neither must not block its supervisor."""
        with contextlib.suppress(OSError), os.fdopen(env_write, "wb") as stream:
            stream.write(json.dumps(environment).encode())
        with contextlib.suppress(OSError), os.fdopen(stdin, "wb", closefd=not talks) as stream:
            stream.write(request.encode())

    def send(self, line: bytes) -> None:
        """Write one line to its stdin; it may block while the child does not read. Raises OSError when it has gone."""
        self._feeder.join()
        with self._sending:
            if self._stdin < 0:
                raise BrokenPipeError("its stdin is closed")
            rest = memoryview(line + b"\n")
            while rest:
                rest = rest[os.write(self._stdin, rest) :]

    def say(self, word: bytes) -> None:
        """Write one line to its stdin, if it still reads."""
        with contextlib.suppress(OSError):
            self.send(word)

    def end_input(self) -> None:
        """Close its stdin: a session then ends at once."""
        with self._sending:
            if self._stdin >= 0:
                os.close(self._stdin)
                self._stdin = -1

    @property
    def held_up_seconds(self) -> float:
        """None at all: it begins at once."""
        return 0.0

    def notice(self) -> None:
        """Tell the child that it is to end soon and to go on elsewhere (SIGUSR1)."""
        self._say(b"n")

    def terminate(self) -> None:
        """Ask the child's group to stop (SIGTERM)."""
        self._say(b"t")

    def kill(self) -> None:
        """Kill the whole tree (SIGKILL)."""
        self._say(b"k")

    def _say(self, word: bytes) -> None:
        with self._lock:
            if self._control >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._control, word)

    def read(self, timeout_seconds: float) -> Iterator[tuple[LineKind, bytes]]:
        """Yield `(event, line)` of stdout, `(log, line)` of stderr, and `(tick, b"")` at least every timeout.

        A line of stdout that is too long comes as several `(cut, piece)`. Ends when both streams are closed by every
        process of the tree.
        """
        kinds: dict[int, Literal["event", "log"]] = {self._stdout: "event", self._stderr: "log"}
        cutters = {descriptor: _Lines() for descriptor in kinds}
        poller = select.poll()
        for descriptor in kinds:
            poller.register(descriptor, select.POLLIN | select.POLLHUP)
        while cutters:
            for descriptor, _ in poller.poll(timeout_seconds * 1000):
                chunk = os.read(descriptor, _CHUNK_BYTES)
                lines = cutters[descriptor].feed(chunk) if chunk else cutters[descriptor].rest()
                for line, cut in lines:
                    yield "cut" if cut and descriptor == self._stdout else kinds[descriptor], line
                if not chunk:
                    poller.unregister(descriptor)
                    del cutters[descriptor]
            yield "tick", b""

    def wait(self) -> ChildEnd:
        """Wait until the shim is gone, and with it every process of the tree; tell how the child ended."""
        with os.fdopen(self._status, "rb") as stream:
            text = stream.read()
        with self._lock:
            os.close(self._control)
            self._control = -1
        os.close(self._stdout)
        os.close(self._stderr)
        self._feeder.join()
        self.end_input()
        group = self._group.close() if self._group is not None else None
        if not text:
            return ChildEnd(exit_code=None, signal=None, group=group)
        ended = json.loads(text)
        return ChildEnd(exit_code=ended["exit"], signal=ended["signal"], stragglers=ended["stragglers"], group=group)
