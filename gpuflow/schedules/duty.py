"""Submits what is due, in each beat; several beats submit once.

The id of what is submitted is made from the name of its schedule and the time that was due. So a beat that dies between
submitting and noting it, and a second beat at the same moment, submit the same pipeline again, which changes nothing.
What was missed while no beat ran is submitted once, for the last time that was due.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from kombu.exceptions import OperationalError
from redis.exceptions import LockError, RedisError

from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit_pipeline
from gpuflow.errors import ArtifactError, BrokerUnavailable, GPUFlowError
from gpuflow.logs import get_logger
from gpuflow.schedules.store import LastRun, Schedule, ScheduleStore
from gpuflow.spec import Template

log = get_logger("gpuflow.schedules")

POLL_SECONDS: Final = 5.0
#: A beat that holds the lock for longer is taken for dead, in seconds.
LOCK_SECONDS: Final = 120.0
#: A schedule that cannot be submitted is tried again after POLL_SECONDS, then twice as many each time, up to these.
LONGEST_DELAY_SECONDS: Final = 300.0
_MOST_ERROR: Final = 500


@dataclass(frozen=True, kw_only=True)
class _Span:
    """When a schedule with this record was due last (None: never), and from when until when that is so."""

    text: str
    due: float | None
    since: float
    until: float


@dataclass(frozen=True, kw_only=True)
class _Delay:
    """Why a schedule with this record could not be submitted, when, and for how many seconds it is not tried again."""

    text: str
    error: str = ""
    since: float = 0.0
    seconds: float = 0.0


class Schedules(threading.Thread):
    """Looks for what is due until the process ends. `clock` is the time of the fleet, in Unix seconds."""

    def __init__(
        self, app: GPUFlow, clock: Callable[[], float] | None = None, poll_seconds: float = POLL_SECONDS
    ) -> None:
        super().__init__(name="gpuflow-schedules", daemon=True)
        self._app = app
        self._store = ScheduleStore(app.redis, app.keys, app.signer)
        self._clock = clock or self._store.now
        self._poll_seconds = poll_seconds
        self._stop_event = threading.Event()
        self._unreadable: set[str] = set()
        self._spans: dict[str, _Span] = {}
        self._delays: dict[str, _Delay] = {}

    def stop(self) -> None:
        """End after the current round."""
        self._stop_event.set()

    def run(self) -> None:
        """Look again and again; a broker that is away is tried again at the next turn."""
        while not self._stop_event.wait(self._poll_seconds):
            try:
                self.look_in_turn()
            except (RedisError, OperationalError, BrokerUnavailable) as error:
                log.warning("schedules_not_run", cause=str(error))
            except Exception:
                log.exception("schedules_crashed")

    def look_in_turn(self) -> None:
        """Look, unless another beat does at this moment. Raises redis errors."""
        key = f"{self._app.keys.prefix}gpuflow.schedules.lock"
        lock = self._app.redis.lock(key, timeout=LOCK_SECONDS, blocking=False)
        if not lock.acquire():
            return
        try:
            self.look()
        finally:
            try:
                lock.release()
            except LockError:
                log.warning("schedules_lock_expired")

    def look(self) -> list[str]:
        """Submit what is due; return the ids. Raises redis errors, BrokerUnavailable."""
        texts, runs, now, done = self._store.texts(), self._store.runs(), self._clock(), []
        self._forget_others(texts)
        for name, text in texts.items():
            if text in self._unreadable:
                continue
            try:
                schedule = Schedule.from_json(name, text)
                due = self._last_due(schedule, text, now)
            except (GPUFlowError, ValueError, KeyError, TypeError, OverflowError) as error:
                self._unreadable.add(text)
                log.error("schedule_unreadable", schedule=name, cause=f"{type(error).__name__}: {error}")
                continue
            before = runs.get(name, LastRun())
            # A run that lies ahead was noted while the clock was wrong: what it hides was submitted, or is now.
            if due is None or due <= max(schedule.created_at, before.due if before.due <= now else 0.0):
                continue
            if self._waits(name, now):
                continue
            pipeline = self._submit(schedule, text, due, before)
            if pipeline:
                done.append(pipeline)
        return done

    def _forget_others(self, texts: Mapping[str, str]) -> None:
        """Keep in memory what is about these schedules alone."""
        self._unreadable &= set(texts.values())
        self._spans = {name: span for name, span in self._spans.items() if name in texts}
        self._delays = {name: delay for name, delay in self._delays.items() if texts.get(name) == delay.text}

    def _last_due(self, schedule: Schedule, text: str, now: float) -> float | None:
        """Return when it was due last; until it is due again that is known. Raises InvalidTemplate."""
        span = self._spans.get(schedule.name)
        if span is None or span.text != text or not span.since <= now < span.until:
            cron = schedule.parsed()
            due = cron.last_until(now)
            span = _Span(text=text, due=due, since=now if due is None else due, until=cron.next_after(now))
            self._spans[schedule.name] = span
        return span.due

    def _waits(self, name: str, now: float) -> bool:
        """Say whether its last failure is too young. A clock that was put back makes nobody wait for longer."""
        delay = self._delays.get(name)
        return delay is not None and delay.since <= now < delay.since + delay.seconds

    def _submit(self, schedule: Schedule, text: str, due: float, before: LastRun) -> str:
        """Submit a schedule for a time; one that cannot be submitted now is tried again, a bad one at its next time."""
        name = schedule.name
        at = datetime.fromtimestamp(due, UTC).strftime("%Y-%m-%dT%H:%MZ")
        key = f"schedule:{name}:{at}"
        found = self._store.template_text(name, text)
        if found is None:  # removed or replaced meanwhile: the next look sees it
            return ""
        try:
            refused = self._store.refusal(name, text, found)
            if refused is not None:
                raise refused
            template = Template.from_dict(json.loads(found))
            run = submit_pipeline(
                template, idempotency_key=key, owner=schedule.owner or None, uploads=False, app=self._app
            )
        except BrokerUnavailable:
            raise
        except ArtifactError as error:
            self._delay(name, text, at, before, f"{type(error).__name__}: {error}"[:_MOST_ERROR])
            return ""
        except (GPUFlowError, ValueError, KeyError, TypeError) as error:
            log.error("schedule_failed", schedule=name, due=at, cause=str(error))
            self._store.note(name, LastRun(due=due, error=f"{type(error).__name__}: {error}"[:_MOST_ERROR]))
            return ""
        self._delays.pop(name, None)
        self._store.note(name, LastRun(due=due, pipeline=run.id))
        log.info("schedule_submitted", schedule=name, due=at, pipeline=run.id)
        return run.id

    def _delay(self, name: str, text: str, at: str, before: LastRun, error: str) -> None:
        """Have a schedule wait that cannot be submitted now, twice as long each time; say each cause once."""
        delay = self._delays.get(name, _Delay(text=text))
        if error != delay.error:
            log.warning("schedule_not_submitted", schedule=name, due=at, cause=error)
        seconds = min(LONGEST_DELAY_SECONDS, 2 * delay.seconds or POLL_SECONDS)
        self._delays[name] = _Delay(text=text, error=error, since=self._clock(), seconds=seconds)
        if error != before.error:  # it stays due
            self._store.note(name, replace(before, error=error))


def start(app: GPUFlow) -> None:
    """Start the schedules of a beat process."""
    Schedules(app).start()
