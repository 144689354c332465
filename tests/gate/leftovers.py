"""Finds processes that outlive their tests: by a mark in their environment. Standard library only; Linux."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: The variable of the mark. `.ci/run` sets it to the id of the whole run.
VARIABLE: Final = "GPUFLOW_TEST_RUN"
_PROC: Final = Path("/proc")
#: A process without an environment that is younger is just being executed (execve closes the pipe by which its parent
#: learns of that before the new environment can be read), or has none.
_YOUNG_SECONDS: Final = 1.0
#: Helpers that Python's own multiprocessing keeps until the process ends.
_OF_PYTHON: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A process that carries a mark."""

    pid: int
    mark: str
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid}: {self.command}"


def mark_this_process() -> str:
    """Mark what this process will start, and return the mark: the id of the run, a slash, our process id."""
    run = os.environ.get(VARIABLE, "").partition("/")[0] or uuid.uuid4().hex
    mark = f"{run}/{os.getpid()}"
    os.environ[VARIABLE] = mark
    return mark


@contextlib.contextmanager
def kept_for_the_session() -> Iterator[None]:
    """Mark what is started inside as wanted until the end of the session."""
    before = os.environ.get(VARIABLE, "")
    os.environ[VARIABLE] = f"{before}/session"
    try:
        yield
    finally:
        os.environ[VARIABLE] = before


def passed_on() -> dict[str, str]:
    """Return the variables by which a worker and its children are marked, for an environment that is made anew."""
    return {VARIABLE: os.environ[VARIABLE], "GPUFLOW_PASS_ENV": VARIABLE}


def find(mark: str, *, whole_run: bool = False) -> list[Leftover]:
    """Return the running processes with this mark; with `whole_run`, those of every test process of the run `mark`.

    An empty mark with `whole_run` means: of any run.
    """
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            theirs = _mark_of(_environment_of(entry))
            if theirs != mark if not whole_run else not theirs.startswith(f"{mark}/" if mark else ""):
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if theirs and command and not any(name in command for name in _OF_PYTHON) and not _is_zombie(entry):
                found.append(Leftover(pid=int(entry.name), mark=theirs, command=command[:200]))
    return found


def wait_for_none(mark: str, within: float) -> list[Leftover]:
    """Return what still runs `within` seconds later; end that by force."""
    deadline = time.monotonic() + within
    while (left := find(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    end(left)
    return left


def end(left: list[Leftover]) -> None:
    """Kill these processes."""
    for one in left:
        with contextlib.suppress(OSError):
            os.kill(one.pid, signal.SIGKILL)


def start_guard(mark: str) -> subprocess.Popen[bytes]:
    """Start a process that kills everything with the mark when its standard input ends: when we end, however we do."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__)), mark], stdin=subprocess.PIPE, env=environment, start_new_session=True
    )


def _environment_of(entry: Path) -> bytes:
    """Return the environment of a process. One that is just being executed has none yet, and is waited for."""
    while not (environment := (entry / "environ").read_bytes()):
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - _started_at(entry)
        if age > _YOUNG_SECONDS or _is_zombie(entry):
            break
        time.sleep(0.01)
    return environment


def _started_at(entry: Path) -> float:
    """Return when a process was started, in seconds since the machine was (proc(5), /proc/pid/stat)."""
    ticks = int((entry / "stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def _mark_of(environment: bytes) -> str:
    start = f"{VARIABLE}=".encode()
    return next((one[len(start) :].decode() for one in environment.split(b"\0") if one.startswith(start)), "")


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


if __name__ == "__main__":
    sys.stdin.read()
    for _ in range(3):  # what is being started just now comes with the second or third look
        end([one for kind in ("", "/session") for one in find(sys.argv[1] + kind)])
        time.sleep(0.1)
