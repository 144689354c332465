"""Runs a program to its end: its output line by line, and what happens to its process on a cancel or a notice."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Protocol, cast

from executors import cancellation
from executors.base import ExecutorError, bad_input
from executors.programs.lines import split_lines

#: How often it is seen that the program has ended, or a notice come, in seconds.
_POLL_SECONDS: Final = 0.05
_CHUNK_BYTES: Final = 65_536
#: How often `Reader.drain` looks, in seconds.
_DRAIN_SECONDS: Final = 0.002
#: A stream that says nothing for so long after the end of the program is held open by another process, in seconds.
_QUIET_SECONDS: Final = 1.0
#: What such a process says is read for so long, in seconds; then it is ended with the task.
_MOST_SECONDS: Final = 10.0

#: From SIGTERM to SIGKILL of a program that runs longer than it may, in seconds.
_STOP_SECONDS: Final = 5.0
#: sysexits.h: a temporary failure, the user is invited to try again.
EX_TEMPFAIL: Final = 75
#: Shells whose `trap` is that of POSIX.
_POSIX_SHELLS: Final = frozenset({"sh", "ash", "bash", "dash", "ksh", "mksh", "zsh"})

#: Is given each line of a stream, without its end.
OnLine = Callable[[bytes], None]


class Ran:
    """How a program has ended: `code` as the shell has it (128 + N for signal N), and whether it was given notice.

    `signal` is what ended it, also where a shell says so of what it ran; else 0.
    """

    def __init__(self, code: int, *, noticed: bool, in_shell: bool = False) -> None:
        self.code = code if code >= 0 else 128 - code
        told = self.code - 128 if in_shell and self.code - 128 in signal.valid_signals() else 0
        self.signal = -code if code < 0 else told
        self.noticed = noticed


class Running(Protocol):
    """A program that runs, as a process or in a container."""

    @property
    def streams(self) -> tuple[IO[bytes], IO[bytes]]:
        """Its stdout and stderr."""

    def ended(self, timeout_seconds: float) -> int | None:
        """Wait so long at most; return its exit code, -N for signal N, None while it runs. Raises ExecutorError."""

    def signal(self, number: int) -> None:
        """Send it a signal; nothing for one that has ended."""


class Talking(Running, Protocol):
    """A program that runs and is written to."""

    def send(self, line: bytes) -> None:
        """Write to its input; it may block while nobody reads. Raises OSError where it has gone."""

    def end_input(self) -> None:
        """Close its input; nothing for one that has ended."""


class Process:
    """A program as a process of this machine. With `in_shell`, what the shell runs has a notice too."""

    def __init__(self, process: subprocess.Popen[bytes], *, in_shell: bool = False) -> None:
        self._process, self._in_shell = process, in_shell
        self.streams = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stderr)

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        in_shell: bool = False,
    ) -> Process:
        """Start a program. Raises ExecutorError: BadInput for one that cannot be started."""
        return cls(_started(argv, cwd, environment, stdin), in_shell=in_shell)

    def ended(self, timeout_seconds: float) -> int | None:
        """Wait so long at most; return its exit code, -N for signal N, None while it runs."""
        try:
            return self._process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """Send it a signal; nothing for one that has ended."""
        children = _children(self._process.pid) if self._in_shell and number == signal.SIGUSR1 else []
        self._process.send_signal(number)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    def send(self, line: bytes) -> None:
        """Write to its input, which was started as a pipe. Raises OSError where nobody reads it any more."""
        stdin = cast("IO[bytes]", self._process.stdin)
        stdin.write(line)
        stdin.flush()

    def end_input(self) -> None:
        """Close its input; nothing for one that has none any more."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started and not waited for; none where the system does not say."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def shell_argv(shell: str, line: str) -> list[str]:
    """Return how a shell runs a line so that it ends as what it runs does: a notice and a cancel let that end first.

    Without this a shell dies at once of either, and nothing waits for the program in it; or it goes on with the rest of
    the line, as if the program had come to its end.
    """
    if Path(shell).name in _POSIX_SHELLS:
        line = f"trap 'exit {EX_TEMPFAIL}' USR1; trap 'exit {128 + signal.SIGTERM}' TERM; {line}"
    return [shell, "-c", line]


def run(
    argv: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    on_stdout: OnLine,
    on_stderr: OnLine,
    timeout_seconds: float | None = None,
    stdin: int = subprocess.DEVNULL,
    in_shell: bool = False,
) -> Ran:
    """Run `argv` and return how it ended, see `follow`. Its input is empty, unless `stdin` is a file descriptor.

    `in_shell` says that it is made by `shell_argv`. What else it has started is ended by the shim. Raises ExecutorError
    for a program that cannot be started.
    """
    with cancellation.notice_held():
        program = Process.start(argv, cwd=cwd, environment=environment, stdin=stdin, in_shell=in_shell)
        ran = follow(program, on_stdout=on_stdout, on_stderr=on_stderr, timeout_seconds=timeout_seconds)
        return Ran(ran.code, noticed=ran.noticed, in_shell=True) if in_shell and not ran.signal else ran


def follow(program: Running, *, on_stdout: OnLine, on_stderr: OnLine, timeout_seconds: float | None = None) -> Ran:
    """Read a program that runs to its end, and return how it ended. Called with `notice_held`.

    A notice (SIGUSR1) is passed on, and its end awaited; so is a cancel, as SIGTERM, before Cancelled is raised. After
    that no line is passed on. Raises ExecutorError for a program that runs longer than `timeout_seconds`: it
    gets SIGTERM, and SIGKILL a little later.
    """
    readers = [Reader(stream, on_line) for stream, on_line in zip(program.streams, (on_stdout, on_stderr), strict=True)]
    try:
        code, noticed = _until_it_ends(program, readers, timeout_seconds)
    except _TooLong:
        stop(program)
        raise ExecutorError(
            "TimeLimitExceeded", f"stopped after {timeout_seconds:g} s, the limit of its preset; raise its `timeout`"
        ) from None
    except cancellation.Cancelled:
        program.signal(signal.SIGTERM)
        while program.ended(_POLL_SECONDS) is None:
            pass
        raise
    except BaseException:
        with contextlib.suppress(ExecutorError):  # what ended it counts, not that it has gone
            stop(program)
        raise
    for reader in readers:
        reader.finish()
    return Ran(code, noticed=noticed)


class _TooLong(Exception):
    """It runs longer than it may."""


def stop(program: Running, after_seconds: float = _STOP_SECONDS) -> None:
    """End a program by SIGTERM, or by SIGKILL after a while. Raises ExecutorError."""
    program.signal(signal.SIGTERM)
    kill_at = time.monotonic() + after_seconds
    while program.ended(_POLL_SECONDS) is None:
        if time.monotonic() >= kill_at:
            program.signal(signal.SIGKILL)


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
        if os.sep in argv[0] and (cwd / argv[0]).is_file():
            raise bad_input(
                f"{argv[0]!r} names an interpreter in its first line (#!) that is not on this worker; install it, or "
                "run the file by another one"
            ) from error
        raise bad_input(
            f"{argv[0]!r} is not on this worker; install it there, or give the path of a program"
        ) from error
    except PermissionError as error:
        if error.filename == str(cwd):
            raise bad_input(
                f"{cwd} cannot be entered by this worker: {error.strerror}; give it the right to"
            ) from error
        raise bad_input(f"{argv[0]!r} cannot be run by this worker: {error.strerror}; make it executable") from error
    except (OSError, ValueError) as error:
        raise bad_input(f"{argv[0]!r} cannot be run: {error}") from error


def _until_it_ends(program: Running, readers: Sequence[Reader], timeout_seconds: float | None) -> tuple[int, bool]:
    """Wait; return its code, and whether there was a notice, which it has been given. Raises what a reader raised."""
    noticed = False
    stop_at = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    while (code := program.ended(_POLL_SECONDS)) is None:
        for reader in readers:
            reader.check()
        if cancellation.noticed() and not noticed:
            noticed = True
            program.signal(signal.SIGUSR1)
        if time.monotonic() >= stop_at:
            raise _TooLong
    return code, noticed


class Reader(threading.Thread):
    """Reads one stream of the program."""

    def __init__(self, stream: IO[bytes], on_line: OnLine) -> None:
        super().__init__(name="gpuflow-output", daemon=True)
        self._stream, self._on_line = stream, on_line
        self._bytes = 0
        #: How often it has asked for more, whether it waits for that, and whether no line is passed on any more.
        self._reads = 0
        self._waits = self._over = False
        self._passing = threading.Lock()
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Take every line. What that raises is raised where the program is waited for."""
        try:
            for line in split_lines(self._chunks()):
                with self._passing:
                    if not self._over:
                        self._on_line(line)
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._stream.close()

    def check(self) -> None:
        """Raise what was raised here."""
        if self._error is not None:
            raise self._error

    def _chunks(self) -> Iterator[bytes]:
        poller = select.poll()
        poller.register(self._stream.fileno(), select.POLLIN)
        while True:
            self._reads, self._waits = self._reads + 1, True
            poller.poll()  # nothing is taken while it waits, see `drain`
            self._waits = False
            chunk = os.read(self._stream.fileno(), _CHUNK_BYTES)
            if not chunk:
                return
            self._bytes += len(chunk)
            yield chunk

    def drain(self, most_seconds: float) -> None:
        """Wait, so long at most, until every whole line that is in the stream now is passed on."""
        ends_at = time.monotonic() + most_seconds
        poller = select.poll()
        try:
            poller.register(self._stream.fileno(), select.POLLIN)
            while self.is_alive() and time.monotonic() < ends_at and (poller.poll(0) or not self._waits):
                time.sleep(_DRAIN_SECONDS)
        except ValueError:
            return  # it is closed: all of it is passed on

    def finish(self) -> None:
        """Read what is there after the end of the program. What it has left running may hold the stream open."""
        ends_at = time.monotonic() + _MOST_SECONDS
        while self.is_alive():
            size, reads = self._bytes, self._reads
            self.join(timeout=_QUIET_SECONDS)
            # What has been read is passed on, however long that takes; it is what comes after it that has its time.
            is_quiet = self._waits and self._bytes == size
            if is_quiet or (time.monotonic() >= ends_at and (self._waits or self._reads != reads)):
                break
        with self._passing:
            self._over = True
        self.check()
