"""One attempt of one task: a child process, its events, its limits, and how it ended.

Runs on a pool thread. It is told to stop from other threads (`stop`). What it learns goes to the ledger as it
happens; the end is returned as an `Outcome`, and the supervisor commits it.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from gpuflow.ledger.ledger import Ledger
from gpuflow.logs import get_logger
from gpuflow.protocol import Event, Request, parse_line
from gpuflow.worker.child import Child, ChildEnd

log = get_logger("gpuflow.attempt")

#: Events are sent to Redis at most this often, in seconds.
FLUSH_SECONDS: Final = 0.1
#: Without events, the record is still asked this often whether the task is to stop, in seconds.
ASK_SECONDS: Final = 1.0
#: Most events of one flush; a child that floods its stdout is slowed down by the pipe, not stored at length.
FLUSH_EVENTS: Final = 500

StopReason = Literal["cancelled", "timeout", "soft_timeout", "lost", "superseded", "shutdown"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended: the result value of a completed one, or the error record of any other."""

    completed: bool
    result: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    stop: StopReason | None = None
    artifacts: tuple[str, ...] = ()


class Attempt:
    """Runs one child to its end.

    `grace_seconds` is the time from SIGTERM to SIGKILL; `deadline_seconds` the time-out of the whole attempt (None:
    no limit), enforced for silent children too. `on_progress` gets the last progress of each flush.
    """

    def __init__(
        self,
        request: Request,
        ledger: Ledger,
        *,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        grace_seconds: float,
        deadline_seconds: float | None = None,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.request = request
        self.ledger = ledger
        self._argv = argv
        self._environment = environment
        self._log_path = log_path
        self._grace_seconds = grace_seconds
        self._deadline_seconds = deadline_seconds
        self._on_progress = on_progress
        self._child: Child | None = None
        self._stop: StopReason | None = None
        self._kill_at: float | None = None
        self._lock = threading.Lock()
        self._events: list[str] = []
        self._progress: dict[str, Any] | None = None
        self._finish: Mapping[str, Any] | None = None
        self._result: dict[str, Any] = {}
        self._artifacts: list[str] = []

    @property
    def shim_pid(self) -> int | None:
        """Process id of the shim, once it runs."""
        return self._child.shim_pid if self._child else None

    def stop(self, reason: StopReason, *, at_once: bool = False) -> None:
        """Stop the child: SIGTERM, and SIGKILL after the grace; `at_once` for SIGKILL now. The first reason counts."""
        with self._lock:
            first = self._stop is None
            if first:
                self._stop = reason
            if at_once or reason in ("lost", "superseded"):
                self._kill_at = time.monotonic()
                if self._child is not None:
                    self._child.kill()
            elif first:
                self._kill_at = time.monotonic() + self._grace_seconds
                if self._child is not None:
                    self._child.terminate()

    def run(self) -> Outcome:
        """Start the child, follow it to its end, and say how it ended. Nothing of it is left then."""
        started = time.monotonic()
        try:
            child = Child(
                self._argv,
                request=self.request.to_json(),
                environment=self._environment,
                cwd=Path(self.request.output_dir),
            )
        except OSError as error:
            return Outcome(completed=False, error=_error("CannotStart", f"the child cannot start: {error}", True))
        with self._lock:
            self._child = child
            if self._stop is not None:
                child.kill()
        with self._log_path.open("ab", buffering=0) as log_file:
            self._follow(child, log_file.write, started)
        end = child.wait()
        self._flush()
        return self._judge(end, time.monotonic() - started)

    def _follow(self, child: Child, write_log: Callable[[bytes], int | None], started: float) -> None:
        flushed = asked = time.monotonic()
        for kind, line in child.read(FLUSH_SECONDS):
            if kind == "log":
                write_log(line + b"\n")
                self._note(Event(name="log", data={"message": line.decode("utf-8", "replace"), "stream": "stderr"}))
            elif kind == "event":
                self._handle(parse_line(line))
            now = time.monotonic()
            self._enforce(child, now, started)
            due = self._events and (now - flushed >= FLUSH_SECONDS or len(self._events) >= FLUSH_EVENTS)
            if due or now - asked >= ASK_SECONDS:
                self._flush()
                flushed = asked = now

    def _enforce(self, child: Child, now: float, started: float) -> None:
        if self._stop is None and self._deadline_seconds is not None and now - started > self._deadline_seconds:
            self.stop("timeout")
        with self._lock:
            overdue = self._kill_at is not None and now >= self._kill_at
            if overdue:
                self._kill_at = None
        if overdue:
            child.kill()

    def _handle(self, event: Event) -> None:
        if event.name == "finish":
            self._finish = event.data
        elif event.name == "result":
            value = event.data["value"]
            self._result = dict(value) if isinstance(value, Mapping) else {"value": value}
            return
        elif event.name == "artifact":
            self._artifacts.append(str(event.data["path"]))
        elif event.name == "progress":
            self._progress = dict(event.data)
        self._note(event)

    def _note(self, event: Event) -> None:
        self._events.append(event.to_json())

    def _flush(self) -> None:
        events, self._events = self._events, []
        progress, self._progress = self._progress, None
        text = json.dumps(progress) if progress is not None else ""
        try:
            answer = self.ledger.report(self.request.task_id, self.request.attempt, events, text)
        except Exception as error:  # noqa: BLE001  (redis errors: the lease decides whether we go on)
            self._events = events[-FLUSH_EVENTS:]
            log.warning("events_not_reported", task=self.request.task_id, cause=str(error))
            return
        if answer == "cancel":
            self.stop("cancelled")
        elif answer == "superseded":
            self.stop("superseded")
        elif progress is not None and self._on_progress is not None:
            self._on_progress(progress)

    def _judge(self, end: ChildEnd, seconds: float) -> Outcome:
        artifacts = tuple(dict.fromkeys(self._artifacts))
        finish = self._finish or {}
        status = finish.get("status")
        if (
            status == "completed"
            and end.exit_code == 0
            and self._stop in (None, "cancelled", "soft_timeout", "timeout")
        ):
            return Outcome(completed=True, result=self._result, artifacts=artifacts)
        if self._stop is not None:
            error = _stopped(self._stop, seconds, self._deadline_seconds)
            return Outcome(completed=False, error=error, stop=self._stop, artifacts=artifacts)
        return Outcome(completed=False, error=_failed(finish, end), artifacts=artifacts)


def _error(kind: str, message: str, retryable: bool) -> dict[str, Any]:
    return {"type": kind, "message": message, "retryable": retryable}


def _stopped(reason: StopReason, seconds: float, limit: float | None) -> dict[str, Any]:
    if reason == "timeout":
        limit_text = f"{limit:g} s" if limit is not None else "the time limit"
        return _error("TimeLimitExceeded", f"stopped after {seconds:.1f} s: the limit is {limit_text}", False)
    if reason == "soft_timeout":
        return _error("SoftTimeLimitExceeded", f"stopped after {seconds:.1f} s by the soft time limit", False)
    if reason == "cancelled":
        return _error("Cancelled", "cancelled by a user", False)
    return _error("WorkerLost", f"the attempt was given up: {reason}", True)


def _failed(finish: Mapping[str, Any], end: ChildEnd) -> dict[str, Any]:
    status = finish.get("status")
    given = finish.get("error")
    if status == "completed":
        return _error("Contradiction", f"the child said completed, but ended with {_ending(end)}", False)
    if isinstance(given, Mapping):
        return _error(
            str(given.get("type", "Failed")),
            str(given.get("message", "")),
            bool(given.get("retryable", False)),
        )
    if status in ("failed", "cancelled"):
        return _error("Failed", f"the child said {status} and gave no error", False)
    if end.signal is not None or end.exit_code != 0:
        killed = end.signal == signal.SIGKILL
        hint = " (was the machine out of memory?)" if killed else ""
        return _error("ChildDied", f"the child ended with {_ending(end)}{hint}; see the log", killed)
    return _error("NoFinish", "the child ended without a finish event; see the log", False)


def _ending(end: ChildEnd) -> str:
    if end.signal is not None:
        return f"signal {signal.Signals(end.signal).name}"
    return f"exit code {end.exit_code}" if end.exit_code is not None else "its supervisor process"
