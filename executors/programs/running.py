"""Runs a program to its end: its output line by line, and what happens to its process on a cancel or a notice."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

from executors import cancellation
from executors.base import ExecutorError, bad_input
from executors.programs.lines import split_lines

#: How often it is seen that the program has ended, or a notice come, in seconds.
_POLL_SECONDS: Final = 0.05
_CHUNK_BYTES: Final = 65_536
#: A stream that says nothing for so long after the end of the program is held open by another process, in seconds.
_QUIET_SECONDS: Final = 1.0
#: What such a process says is read for so long, in seconds; then it is ended with the task.
_MOST_SECONDS: Final = 10.0

#: Is given each line of a stream, without its end.
OnLine = Callable[[bytes], None]


class Ran:
    """How a program has ended: `code` as the shell has it (128 + N for signal N), and whether it was given notice."""

    def __init__(self, code: int, *, noticed: bool) -> None:
        self.code = code if code >= 0 else 128 - code
        self.signal = -code if code < 0 else 0
        self.noticed = noticed


def run(
    argv: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    on_stdout: OnLine,
    on_stderr: OnLine,
    stdin: int = subprocess.DEVNULL,
) -> Ran:
    """Run `argv` and return how it ended. Its input is empty, unless `stdin` is a file descriptor.

    A notice (SIGUSR1) is passed on, and its end awaited; so is a cancel, as SIGTERM, before Cancelled is raised. What
    else it has started is ended by the shim. Raises ExecutorError for a program that cannot be started.
    """
    with cancellation.notice_held():
        process = _started(argv, cwd, environment, stdin)
        pairs = ((process.stdout, on_stdout), (process.stderr, on_stderr))
        readers = [_Reader(cast("IO[bytes]", stream), on_line) for stream, on_line in pairs]
        try:
            noticed = _until_it_ends(process, readers)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        for reader in readers:
            reader.finish()
        return Ran(process.returncode, noticed=noticed)


def _started(argv: Sequence[str], cwd: Path, environment: Mapping[str, str], stdin: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except FileNotFoundError as error:
        raise ExecutorError(
            "BadInput", f"{argv[0]!r} is not on this worker; install it there, or give the path of a program"
        ) from error
    except PermissionError as error:
        raise bad_input(f"{argv[0]!r} cannot be run by this worker: {error.strerror}; make it executable") from error
    except (OSError, ValueError) as error:
        raise bad_input(f"{argv[0]!r} cannot be run: {error}") from error


def _until_it_ends(process: subprocess.Popen[Any], readers: Sequence[_Reader]) -> bool:
    """Wait; return whether there was a notice, which the program has been given. Raises what a reader raised."""
    noticed = False
    while True:
        try:
            process.wait(timeout=_POLL_SECONDS)
            return noticed
        except subprocess.TimeoutExpired:
            for reader in readers:
                reader.check()
            if cancellation.noticed() and not noticed:
                noticed = True
                process.send_signal(signal.SIGUSR1)


class _Reader(threading.Thread):
    """Reads one stream of the program."""

    def __init__(self, stream: IO[bytes], on_line: OnLine) -> None:
        super().__init__(name="gpuflow-output", daemon=True)
        self._stream, self._on_line = stream, on_line
        self._bytes = 0
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Take every line. What that raises is raised where the program is waited for."""
        try:
            for line in split_lines(self._chunks()):
                self._on_line(line)
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def check(self) -> None:
        """Raise what was raised here."""
        if self._error is not None:
            raise self._error

    def _chunks(self) -> Iterator[bytes]:
        while chunk := os.read(self._stream.fileno(), _CHUNK_BYTES):
            self._bytes += len(chunk)
            yield chunk

    def finish(self) -> None:
        """Read what is there after the end of the program. What it has left running may hold the stream open."""
        before, ends_at = -1, time.monotonic() + _MOST_SECONDS
        while self.is_alive() and self._bytes != before and time.monotonic() < ends_at:
            before = self._bytes
            self.join(timeout=_QUIET_SECONDS)
        self.check()
