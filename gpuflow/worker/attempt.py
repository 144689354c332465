"""One attempt of one task: its child or its request to a session, the events, the limits, and how it ended.

Runs on a pool thread. It is told to stop from other threads (`stop`). What it learns goes to the ledger as it
happens; the end is returned as an `Outcome`, and the supervisor commits it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from redis.exceptions import RedisError

from gpuflow.functions.calls import NOTICE, SOFT_LIMIT, STATE_EVENT
from gpuflow.ledger.ledger import Holder, Ledger
from gpuflow.logs import get_logger
from gpuflow.protocol import FUNCTION_TYPE, Event, Request, parse_line
from gpuflow.secrets import Redactor, known
from gpuflow.worker.child import ChildEnd, RunningWork
from gpuflow.worker.child_log import ChildLog
from gpuflow.worker.event_budget import MAX_ARTIFACTS, MAX_PROGRESS_BYTES, EventBudget
from gpuflow.worker.given_result import GivenResult, ResultLost, shown_piece
from gpuflow.worker.outcome import (
    HandedBack,
    Outcome,
    StopReason,
    cannot_start,
    failed,
    handed_back,
    stopped,
    succeeded,
)

log = get_logger("gpuflow.attempt")

#: Events are sent to Redis at most this often, in seconds.
FLUSH_SECONDS: Final = 0.1
#: Without events, the record is still asked this often whether the task is to stop, in seconds.
ASK_SECONDS: Final = 1.0
#: Most events of one flush; a child that floods its stdout is slowed down by the pipe, not stored at length.
FLUSH_EVENTS: Final = 500
#: Most bytes of one flush; a single event may be larger.
FLUSH_BYTES: Final = 1 << 20

#: Events whose texts are a result: known secrets are hidden in them, and nothing that merely looks like one.
_CONTENT: Final = frozenset({"result", "text", "text_delta", STATE_EVENT})

#: The end of a child's log that is kept in the record of the attempt, in characters.
LOG_TAIL: Final = 4000


class Attempt:
    """Runs one piece of work to its end: `launch` starts it (OSError: it cannot be started; HandedBack: not here).

    `grace_seconds` is the time from SIGTERM to SIGKILL, `notice_seconds` that from the notice of a preemption to
    SIGTERM; `deadline_seconds` the time-out of the whole attempt (None: no limit), enforced for silent children too,
    from `began_at` on (monotonic seconds; None: from the start of the child).
    `celery_meta` makes Celery's result entry from the last progress (None at the start), which the ledger writes if the
    attempt is current; `on_tick` is called all the time that this supervisor lives, `on_checkpoint` (set it before the
    run) when the child may have a new checkpoint. What the child says passes the `redactor` first: events, log, result
    and error.
    """

    def __init__(
        self,
        request: Request,
        ledger: Ledger,
        holder: Holder,
        *,
        launch: Callable[[], RunningWork],
        log_path: Path,
        log_max_bytes: int,
        grace_seconds: float,
        notice_seconds: float,
        deadline_seconds: float | None = None,
        began_at: float | None = None,
        celery_meta: Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None], str] | None = None,
        on_tick: Callable[[], None] | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        self.request = request
        self.ledger = ledger
        self.holder = holder
        self._launch = launch
        self._log_path = log_path
        self._log_max_bytes = log_max_bytes
        self._grace_seconds = grace_seconds
        self._notice_seconds = notice_seconds
        self._deadline_seconds = deadline_seconds
        self._began_at = began_at
        self._celery_meta = celery_meta
        self._reported = False
        self._celery_state: Mapping[str, Any] | None = None
        self._on_tick = on_tick
        self.redactor = redactor or Redactor()
        self.on_checkpoint: Callable[[], None] | None = None
        self._end_by: float | None = None
        self._child: RunningWork | None = None
        self._stop: StopReason | None = None
        self._soft = False
        self._is_function = request.task_type == FUNCTION_TYPE
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
        self._log_tail = ""
        self._lock = threading.Lock()
        self._events: list[str] = []
        self._events_bytes = 0
        self._budget = EventBudget()
        self._progress: dict[str, Any] | None = None
        self._finish: Mapping[str, Any] | None = None
        self._began = False
        self._has_text = self._urgent = False
        self._given = GivenResult(Path(request.output_dir))
        self._artifacts: list[str] = []

    @property
    def shim_pid(self) -> int | None:
        """Process id of the shim, once it runs."""
        return self._child.shim_pid if self._child else None

    @property
    def end_by(self) -> float | None:
        """When all of the attempt is to be over since it was told to stop (monotonic seconds); None: no limit."""
        return self._end_by

    def stop(self, reason: StopReason, *, at_once: bool = False) -> None:
        """Stop the child; the first reason counts, a later one can only make it sooner.

        `preempted` sends the notice, then SIGTERM after the time of notice; other reasons SIGTERM, then SIGKILL after
        the grace; `at_once`, and an attempt that is not ours any more, SIGKILL now. A function is told of its soft time
        limit in its child.
        """
        if reason == "soft_timeout" and self._is_function:
            with self._lock:
                self._soft, child = True, self._child
            if child is not None:
                child.say(SOFT_LIMIT)
            return
        now = time.monotonic()
        with self._lock:
            first = self._stop is None
            if first:
                self._stop = reason
            notice_seconds = self._notice_seconds if reason == "preempted" else 0.0
            end_by = now + (0.0 if at_once else notice_seconds + self._grace_seconds)
            self._end_by = end_by if self._end_by is None else min(self._end_by, end_by)
            if at_once or reason in ("lost", "superseded"):
                if not first:
                    self._stop = reason if reason in ("lost", "superseded") else self._stop
                self._kill_at = now
                if self._child is not None:
                    self._child.kill()
            elif reason == "preempted":
                if first:
                    self._terminate_at = now + self._notice_seconds
                    self._notice(self._child)
            elif self._kill_at is None:
                self._terminate_at = None
                self._kill_at = now + self._grace_seconds
                if self._child is not None:
                    self._child.terminate()

    def _notice(self, child: RunningWork | None) -> None:
        """Tell the child that it is to end soon. One of a function ignores the signal, and hears of it by its stdin."""
        if child is not None:
            child.notice()
        if self._is_function and child is not None:
            # It may not have read its request yet: who stops all attempts of a worker does not wait for that.
            threading.Thread(target=child.say, args=(NOTICE,), name="gpuflow-notice", daemon=True).start()

    def run(self) -> Outcome:
        """Start the child, follow it to its end, and say how it ended. Nothing of it is left then."""
        known.add(self.redactor)
        try:
            return self._run()
        finally:
            known.remove(self.redactor)

    def _run(self) -> Outcome:
        started = time.monotonic() if self._began_at is None else self._began_at
        if self._stop is not None:
            return Outcome(completed=False, error=stopped(self._stop, 0, self._deadline_seconds), stop=self._stop)
        try:
            with ChildLog(self._log_path, self._log_max_bytes) as child_log:
                child = self._launch()
                with self._lock:
                    self._child = child
                    if self._stop is not None:
                        child.kill()
                    soft = self._soft
                if soft:
                    child.say(SOFT_LIMIT)
                self._follow(child, child_log, started)
        except BaseException as error:
            if self._child is not None:
                self._child.kill()
            elif isinstance(error, HandedBack):
                return handed_back(error)
            elif isinstance(error, OSError):
                return Outcome(completed=False, error=cannot_start(error))
            raise
        end = child.wait()
        if self._stop != "lost":  # nobody takes its events any more, and a broker that is away may be slow to say so
            self._flush()
        if self._budget.dropped:
            log.warning(
                "events_were_dropped",
                task=self.request.task_id,
                attempt=self.request.attempt,
                events=self._budget.dropped,
                bytes=self._budget.dropped_bytes,
            )
        return self._judge(end, time.monotonic() - started)

    def _follow(self, child: RunningWork, child_log: ChildLog, started: float) -> None:
        flushed = asked = time.monotonic()
        for kind, line in child.read(FLUSH_SECONDS):
            if kind == "log":
                hidden = self.redactor.line(line)
                child_log.write(hidden + b"\n")
                text = hidden.decode("utf-8", "replace")
                self._log_tail = f"{self._log_tail}{text}\n"[-LOG_TAIL:]
                self._note(Event(name="log", data={"message": text, "stream": "stderr"}))
            elif kind == "event":
                self._handle(self._hidden(parse_line(line)))
            elif kind == "cut":
                self._given.passed_over(line)
                self._note(Event(name="log", data={"message": shown_piece(self.redactor.line(line))}))
            now = time.monotonic()
            self._enforce(child, now, started)
            full = len(self._events) >= FLUSH_EVENTS or self._events_bytes >= FLUSH_BYTES
            due = self._events and (self._urgent or now - flushed >= FLUSH_SECONDS or full)
            if due or now - asked >= ASK_SECONDS:
                self._flush()
                self._urgent = False
                flushed = asked = now

    def _enforce(self, child: RunningWork, now: float, started: float) -> None:
        if self._on_tick is not None:
            self._on_tick()
        taken = now - started - child.held_up_seconds
        if self._stop is None and self._deadline_seconds is not None and taken > self._deadline_seconds:
            self.stop("timeout")
        with self._lock:
            if self._terminate_at is not None and now >= self._terminate_at:
                self._terminate_at = None
                self._kill_at = now + self._grace_seconds
                child.terminate()
            overdue = self._kill_at is not None and now >= self._kill_at
            if overdue:
                self._kill_at = math.inf
                child.kill()

    def _hidden(self, event: Event) -> Event:
        if self._is_function and event.name in _CONTENT:
            return event  # what a function returns is what its callers get, as with Celery
        try:
            return replace(event, data=self.redactor.data(event.data, shapes=event.name not in _CONTENT))
        except RecursionError:
            note = f"an event {event.name!r} was left out: it is nested too deeply to be searched for secrets"
            return Event(name="log", data={"message": self.redactor.text(note)}, at=event.at)

    def _handle(self, event: Event) -> None:
        self._began = self._began or event.name != "log"
        if event.name == "finish":
            self._finish = event.data
        elif event.name == "result":
            self._given.told(event.data)
            return
        elif event.name == "artifact":
            if len(self._artifacts) < MAX_ARTIFACTS:
                self._artifacts.append(str(event.data["path"]))
        elif event.name == "progress" and "child" not in event.data:  # that of one caller is not that of the task
            progress = dict(event.data)
            if len(json.dumps(progress)) <= MAX_PROGRESS_BYTES:
                self._progress = progress
        elif event.name == STATE_EVENT and self._is_function:
            if isinstance(event.data.get("state"), str):
                self._celery_state = event.data
            return
        if event.name in ("checkpoint", "artifact") and self.on_checkpoint is not None:
            self.on_checkpoint()
        if event.name == "text_delta" and not self._has_text:
            self._has_text = self._urgent = True  # somebody waits for the first words
        self._note(event)

    def _note(self, event: Event) -> None:
        line = event.to_json()
        size = len(line) if line.isascii() else len(line.encode("utf-8", "replace"))
        if not self._budget.takes(size):
            if self._budget.dropped > 1:
                return
            log.warning("events_dropped", task=self.request.task_id, attempt=self.request.attempt, event_bytes=size)
            note = "this attempt tells too much: from here on events are left out, and stand in its log file alone"
            line = Event(name="log", data={"message": note, "dropped": event.name[:100]}).to_json()
            size = len(line)
        self._events.append(line)
        self._events_bytes += size

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._events_bytes = 0
        progress, self._progress = self._progress, None
        text = json.dumps(progress) if progress is not None else ""
        meta = ""
        state, self._celery_state = self._celery_state, None
        if self._celery_meta is not None and (progress is not None or state is not None or not self._reported):
            meta = self._celery_meta(progress, state)
        try:
            answer = self.ledger.report(self.request.task_id, self.holder, events, text, meta)
        except RedisError as error:
            answer = "behind"
            log.warning("events_not_reported", task=self.request.task_id, cause=str(error))
        if answer == "behind":  # The lease decides whether we go on.
            self._celery_state = self._celery_state or state
            while events and len(self._events) < FLUSH_EVENTS and self._events_bytes < FLUSH_BYTES:
                self._events.append(events.pop())
                self._events_bytes += len(self._events[-1])
            self._events.reverse()
            return
        self._reported = True
        if answer == "cancel":
            self.stop("cancelled")
        elif answer == "superseded":
            self.stop("superseded")

    def _judge(self, end: ChildEnd, seconds: float) -> Outcome:
        artifacts = tuple(dict.fromkeys(self._artifacts))
        finish = self._finish or {}
        lost = None
        try:
            if succeeded(finish, end) and self._stop not in ("lost", "superseded"):
                result = self._given.read(None if self._is_function else self.redactor)
                return Outcome(completed=True, result=result, artifacts=artifacts, log_tail=self._log_tail)
        except ResultLost as error:
            lost = error.record()
        finally:
            self._given.forget()
        told = failed(finish, end) if self._stop is None else stopped(self._stop, seconds, self._deadline_seconds)
        return Outcome(
            completed=False,
            error=lost or told,
            stop=self._stop,
            artifacts=artifacts,
            log_tail=self._log_tail,
            began=self._began or not end.exit_code,
        )
