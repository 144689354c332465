"""One process of a local cluster: started in a session of its own, logged to a file, ended with all its children.

Used by `gpuflow.cluster.local` alone. The process must not outlive us, not even after kill -9: on Linux the kernel
kills it then (PR_SET_PDEATHSIG), and its shims, which watch a pipe to it, end its children. That signal is sent when
the *thread* that started the process ends, so a thread of its own starts each process and waits for it. SIGKILL and no
gentler signal, because the embedded broker ends in the same moment, and a worker without a broker cannot stop well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from gpuflow.errors import GPUFlowError
from gpuflow.terminal import clean

#: Runs in the child before it becomes the program: ask for SIGKILL when the parent dies, look who the parent is, exec.
_EXEC_WITH_PARENT: Final = """
import ctypes, os, sys
parent, program = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(3)
os.execv(program[0], program)
"""

#: How long what is left of a process tree may take to vanish after SIGKILL, in seconds.
_VANISH_SECONDS: Final = 5.0


class ManagedProcess:
    """A running process of the cluster.

    `stop_signals` are sent one after the other, each with the seconds that it is given; SIGKILL comes last by itself.
    Raises GPUFlowError when the program cannot be started.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        stop_signals: Sequence[tuple[int, float]],
    ) -> None:
        self.name = name
        self.log = log
        self.pid = 0
        self.exit_code: int | None = None
        self.started_at = time.monotonic()
        self._argv = list(argv)
        self._environment = dict(environment)
        self._folder = folder
        self._stop_signals = tuple(stop_signals)
        self._error: OSError | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._keep, name=f"gpuflow-{name}", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            raise GPUFlowError(f"cannot start {name}: {self._error.strerror or self._error}; see {log}")

    def _keep(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", _EXEC_WITH_PARENT, str(os.getpid()), *self._argv]
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                    env=self._environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._error = error
            self._ended.set()
            self._started.set()
            return
        self.pid = process.pid
        self._started.set()
        try:
            self.exit_code = process.wait()
        finally:
            self._ended.set()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return not self._ended.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for its end; say whether it has ended."""
        return self._ended.wait(timeout_seconds)

    def tree(self) -> list[psutil.Process]:
        """Return the process and all below it, as far as they live."""
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self.pid)
            if self.alive:
                return [top, *top.children(recursive=True)]
        return []

    def ask(self) -> None:
        """Send the first stop signal, without waiting."""
        if self._stop_signals:
            self._signal(self._stop_signals[0][0])

    def stop(self) -> None:
        """End it, by its stop signals and then by SIGKILL, and see that nothing of its tree is left."""
        family = self.tree()
        for number, seconds in self._stop_signals:
            if not self.alive:
                break
            self._signal(number)
            self._ended.wait(seconds)
            family += [process for process in self.tree() if process not in family]
        self._end(family)

    def kill(self) -> None:
        """Kill it and its tree now."""
        self._end(self.tree())

    def _end(self, family: list[psutil.Process]) -> None:
        self._signal(signal.SIGKILL)
        self._ended.wait(_VANISH_SECONDS)
        # The shims of the children see that the worker has gone and end; what does not by then is killed.
        _, left = psutil.wait_procs([process for process in family if process.pid != self.pid], timeout=1.0)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_VANISH_SECONDS)

    def _signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def log_tail(self, lines: int = 10) -> str:
        """Return the end of its log, or an empty text."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(max(0, self.log.stat().st_size - 16_384))
                text = stream.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(clean(line) for line in text.splitlines()[-lines:])
