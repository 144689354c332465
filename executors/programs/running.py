"""Runs a program to its end: its output line by line, and what happens to its process on a cancel or a notice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

from executors import cancellation
from executors.base import bad_input
from executors.programs.lines import split_lines

#: How often it is seen that the program has ended, or a notice come, in seconds.
_POLL_SECONDS: Final = 0.05
_CHUNK_BYTES: Final = 65_536
#: A stream that says nothing for so long after the end of the program is held open by another process, in seconds.
_QUIET_SECONDS: Final = 1.0
#: What such a process says is read for so long, in seconds; then it is ended with the task.
_MOST_SECONDS: Final = 10.0

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
    in_shell: bool = False,
) -> Ran:
    """Run `argv` and return how it ended. Its input is empty.

    A notice (SIGUSR1) is passed on, and its end awaited; so is a cancel, as SIGTERM, before Cancelled is raised. With
    `in_shell` what the shell runs at that time has the notice too. What else it has started is ended by the shim. No
    line is passed on after this has returned. Raises ExecutorError for a program that cannot be started.
    """
    with cancellation.notice_held():
        process = _started(argv, cwd, environment)
        pairs = ((process.stdout, on_stdout), (process.stderr, on_stderr))
        readers = [_Reader(cast("IO[bytes]", stream), on_line) for stream, on_line in pairs]
        try:
            noticed = _until_it_ends(process, readers, in_shell=in_shell)
        except cancellation.Cancelled:
            process.send_signal(signal.SIGTERM)
            process.wait()  # however long it takes: whoever cancels has a grace
            raise
        except BaseException:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=_MOST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
        for reader in readers:
            reader.finish()
        return Ran(process.returncode, noticed=noticed, in_shell=in_shell)


def _started(argv: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
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


def _until_it_ends(process: subprocess.Popen[Any], readers: Sequence[_Reader], *, in_shell: bool) -> bool:
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
                children = _children(process.pid) if in_shell else []
                process.send_signal(signal.SIGUSR1)
                for child in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGUSR1)


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started and not waited for; none where the system does not say."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


class _Reader(threading.Thread):
    """Reads one stream of the program."""

    def __init__(self, stream: IO[bytes], on_line: OnLine) -> None:
        super().__init__(name="gpuflow-output", daemon=True)
        self._stream, self._on_line = stream, on_line
        self._bytes = 0
        self._over = False
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
        while chunk := os.read(self._stream.fileno(), _CHUNK_BYTES):
            self._bytes += len(chunk)
            yield chunk

    def finish(self) -> None:
        """Read what is there after the end of the program. What it has left running may hold the stream open."""
        before, ends_at = -1, time.monotonic() + _MOST_SECONDS
        while self.is_alive() and self._bytes != before and time.monotonic() < ends_at:
            before = self._bytes
            self.join(timeout=_QUIET_SECONDS)
        with self._passing:
            self._over = True
        self.check()
