"""What a program has said, and what its end means: events, progress, metrics, text, and the error of one that failed.

The same for a process and for a container: both speak the event protocol, or plain text.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from executors import cancellation
from executors.base import ExecutorError
from executors.programs.lines import Progress, metrics_in, progress_in, shortened
from executors.programs.running import EX_TEMPFAIL, Ran
from gpuflow.protocol import EVENT_FIELDS, MAX_RESULT_BYTES, RESULT_FILE, Emitter, Event, parse_line, read_json

#: Characters of the end of what the program printed, which its result holds.
OUTPUT_CHARACTERS: Final = 65_536
#: Lines of stderr, or else of stdout, that the error of a failed program quotes.
_QUOTED_LINES: Final = 8
#: Progress bars are told of at most so often, in seconds.
_BAR_SECONDS: Final = 0.5
#: Characters of each of these.
_QUOTED_CHARACTERS: Final = 1000
#: Most metrics that a task has, whatever names its events give.
_MOST_METRICS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What runs: its name in messages, the first part of its error types, and whether events ask for a `finish`."""

    name: str
    error: str
    needs_finish: bool


PROGRAM: Final = Kind(name="the program", error="Command", needs_finish=False)
CONTAINER: Final = Kind(name="the container", error="Container", needs_finish=True)
#: A container's worker that runs as a process.
WORKER: Final = Kind(name="the process", error="Container", needs_finish=True)


class Heard:
    """What the program has said so far; both of its streams are read at once.

    Its stderr is printed to that of this process; with `tells_stderr` it is told as events of the request, too.
    """

    def __init__(self, emitter: Emitter, patterns: Mapping[str, Any], *, tells_stderr: bool = False) -> None:
        self._emitter, self._patterns = emitter, patterns
        self._tells_stderr = tells_stderr
        self._lock = threading.Lock()
        self._tail: deque[str] = deque()
        self._tail_characters = 0
        self._errors: deque[str] = deque(maxlen=_QUOTED_LINES)
        self._knows_events = False
        #: Whether it has sent an event of the protocol.
        self.has_events = False
        self._shown_at = 0.0
        self._current: tuple[float, float | None, str] = (0, None, "step")
        self._last_bar: Progress | None = None
        self._result: Mapping[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.finish: Mapping[str, Any] | None = None

    def stdout(self, line: bytes) -> None:
        """Take a line of stdout: an event, or text."""
        self.event(parse_line(line), line)

    def event(self, event: Event, line: bytes) -> None:
        """Take a line of stdout as it was read."""
        with self._lock:
            if (
                event.name != "log"
                or "invalid" in event.data
                or event.data.get("message") != line.decode("utf-8", "replace")
            ):
                self._event(event)
                return
            text = str(event.data["message"])
            if not self._said(text):
                text = shortened(text, OUTPUT_CHARACTERS)
                self._keep(text)
                self._emitter.emit("log", message=text)

    def stderr(self, line: bytes) -> None:
        """Take a line of stderr, which goes to the log."""
        text = line.decode("utf-8", "replace")
        with self._lock:
            if not self._said(text):
                self._errors.append(shortened(text, _QUOTED_CHARACTERS))
                print(text, file=sys.stderr, flush=True)
                if self._tells_stderr:
                    self._emitter.emit("log", message=shortened(text, OUTPUT_CHARACTERS), stream="stderr")

    def _event(self, event: Event) -> None:
        data = dict(event.data)
        self.has_events = self.has_events or (event.name in EVENT_FIELDS and event.name != "log")
        if event.name == "progress":
            self._knows_events = True
            self._count(_numbers(data.get("metrics")))
        if event.name == "finish":
            self.finish = data
        elif event.name == "result":
            self._result = data
        elif event.name != "connection":
            self._emitter.emit(event.name, **data)

    def _said(self, text: str) -> bool:
        """Tell of progress and metrics in a line; return whether it was a bar, which is no line of its own."""
        found = metrics_in(text, self._patterns)
        progress = None if self._knows_events else progress_in(text)
        is_bar = progress is not None and progress.is_bar
        self._count(found)
        if progress is not None:
            self._current = progress.current, progress.total, progress.unit
            self._last_bar = progress if is_bar else None
            now = time.monotonic()
            if is_bar and progress.current < progress.total and now - self._shown_at < _BAR_SECONDS and not found:
                return True
            self._shown_at, self._last_bar = now, None
        if progress is not None or found:
            current, total, unit = self._current
            self._emitter.progress(current, total, unit, **found)
        return is_bar

    def _count(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name in self.metrics or len(self.metrics) < _MOST_METRICS:
                self.metrics[name] = value

    def close(self) -> None:
        """Tell of what was held back."""
        if self._last_bar is not None:
            self._emitter.progress(self._last_bar.current, self._last_bar.total, self._last_bar.unit)

    def _keep(self, text: str) -> None:
        self._tail.append(text)
        self._tail_characters += len(text) + 1
        while self._tail_characters - len(self._tail[0]) - 1 >= OUTPUT_CHARACTERS:
            self._tail_characters -= len(self._tail.popleft()) + 1

    def output(self) -> str:
        """Return the end of the text that it printed."""
        return "\n".join(self._tail)[-OUTPUT_CHARACTERS:]

    def value(self, output_dir: Path) -> dict[str, Any]:
        """Return the value of its `result` event. Raises ExecutorError for one that cannot be read."""
        value = self._result.get("value")
        if self._result.get("file"):
            try:
                value = read_json(_plain_file(output_dir / RESULT_FILE))
            except (OSError, ValueError, RecursionError) as error:
                raise ExecutorError(
                    "BadResult", f"the result that it wrote to a file cannot be read: {error}"
                ) from error
        if value is None:
            return {}
        return dict(value) if isinstance(value, Mapping) else {"value": value}

    def last_words(self) -> str:
        """Return what the error of a failed program quotes."""
        said = list(self._tail)[-_QUOTED_LINES:]
        lines = list(self._errors) or [shortened(line, _QUOTED_CHARACTERS) for line in said]
        return "\n".join(lines)


def _plain_file(path: Path) -> bytes:
    """Return the content of a file that a program has written: no link is followed, no pipe waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no plain file")
        content = file.read(MAX_RESULT_BYTES + 1)
    if len(content) > MAX_RESULT_BYTES:
        raise OSError(f"it has more than {MAX_RESULT_BYTES >> 20} MiB")
    return content


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        return {}
    return {
        str(name): one for name, one in metrics.items() if isinstance(one, int | float) and not isinstance(one, bool)
    }


def check(ran: Ran, heard: Heard, kind: Kind) -> None:
    """Raise how the program failed, or that it ended early after a notice; nothing for one that is completed."""
    finish = heard.finish or {}
    status, error = finish.get("status"), finish.get("error")
    if ran.noticed and (ran.code in (EX_TEMPFAIL, 128 + signal.SIGTERM) or ran.signal or status == "cancelled"):
        cancellation.preempt("the program ended after the notice; it goes on from its last complete checkpoint, if any")
    if ran.code == 0 and (status == "completed" or (status is None and not (kind.needs_finish and heard.has_events))):
        return
    if status == "failed" and error:
        raise own_error(error, kind)
    _raise_failure(ran, status, kind, heard.last_words())


def own_error(error: Any, kind: Kind) -> ExecutorError:
    """Return the error that a `finish` event names."""
    told = error if isinstance(error, Mapping) else {"message": error}
    return ExecutorError(
        str(told.get("type") or f"{kind.error}Failed"),
        str(told.get("message") or f"{kind.name} says that it failed"),
        retryable=bool(told.get("retryable")),
    )


def _raise_failure(ran: Ran, status: str | None, kind: Kind, last_words: str) -> NoReturn:
    said = f"; its last words:\n{last_words}" if last_words else ""
    if ran.code == 0 and status is None:
        raise ExecutorError("NoFinish", f"{kind.name} sent events and ended with exit code 0 without `finish`{said}")
    if ran.code == 0:
        raise ExecutorError(f"{kind.error}Failed", f"{kind.name} says {status!r} and ended with exit code 0{said}")
    if status == "completed":
        raise ExecutorError("Contradiction", f"{kind.name} says 'completed' and ended with exit code {ran.code}{said}")
    if ran.signal:
        name = signal.Signals(ran.signal).name if ran.signal in signal.valid_signals() else str(ran.signal)
        raise ExecutorError(f"{kind.error}Killed", f"{kind.name} was ended by {name}{said}", retryable=True)
    raise ExecutorError(
        f"{kind.error}Failed",
        f"{kind.name} ended with exit code {ran.code}{said}",
        retryable=ran.code == EX_TEMPFAIL,
    )
