"""What processes that an engine starts write to stderr: passed on as it is, and its last lines kept.

vLLM's engine core says there why it cannot start; what it raises in our process says only that it could not.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from executors.base import ExecutorError
from executors.failures import classify

#: Lines that are kept: a traceback, and what comes after it.
_KEPT: Final = 400
_LONGEST: Final = 4096
#: Whoever has failed has written all: what is on its way has arrived after this time, at the latest after the other.
_QUIET_SECONDS: Final = 0.3
_ARRIVED_SECONDS: Final = 5.0
#: A line of vLLM's log at level ERROR: what stands before the message.
_ERROR: Final = re.compile(r"\bERROR \d\d-\d\d \d\d:\d\d:\d\d \[.*?\] ?(.*)")
#: The last line of a traceback.
_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*")
#: What vLLM says where the cause is that of another process.
_ELSEWHERE: Final = "root cause"


class Overheard:
    """The last lines that were heard; all of them go on to `target`."""

    def __init__(self, source: int, target: int) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._source, self._target = source, target
        self._heard_at = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="gpuflow-core-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        rest = b""
        while part := os.read(self._source, 65536):
            self._heard_at = time.monotonic()
            with contextlib.suppress(OSError):  # nobody reads our log any more
                view = memoryview(part)
                while view:
                    view = view[os.write(self._target, view) :]
            *lines, rest = (rest + part).split(b"\n")
            self._lines.extend(line[:_LONGEST].decode("utf-8", "replace") for line in lines)
            rest = rest[:_LONGEST]
        self._lines.append(rest.decode("utf-8", "replace"))
        os.close(self._source)
        os.close(self._target)

    def error(self) -> str | None:
        """Return the error that those who write have told of last, as soon as they are quiet; None for none."""
        deadline = time.monotonic() + _ARRIVED_SECONDS
        while self._reader.is_alive() and (now := time.monotonic()) < min(deadline, self._heard_at + _QUIET_SECONDS):
            self._reader.join(min(deadline, self._heard_at + _QUIET_SECONDS) - now)
        told = [match[1].strip() for line in list(self._lines) if (match := _ERROR.search(line))]
        raised = [line for line in told if _RAISED.fullmatch(line)]
        own = [line for line in raised if _ELSEWHERE not in line]
        return (own or raised or [line for line in told if line] or [None])[-1]


@contextlib.contextmanager
def overheard() -> Iterator[Overheard]:
    """Within, hear what processes write to stdout and stderr that are started now, for as long as they live."""
    saved = os.dup(1), os.dup(2)
    source, end = os.pipe()
    heard = Overheard(source, os.dup(saved[1]))
    os.dup2(end, 1)
    os.dup2(end, 2)
    os.close(end)
    try:
        yield heard
    finally:
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def not_started(error: RuntimeError, told: str | None) -> ExecutorError:
    """Return the failure of an engine that did not start; `told` is what its processes say of the cause."""
    why = told or str(error)
    record = classify(RuntimeError(why))
    message = f"vLLM could not start: {record['message']}"
    if record["type"] == "RuntimeError":
        return ExecutorError("EngineNotStarted", message, retryable=True)
    return ExecutorError(record["type"], message, retryable=record["retryable"])
