"""Submits what is due, in each beat; several beats submit once.

The id of what is submitted is made from the name of its schedule and the time that was due. So a beat that dies between
submitting and noting it, and a second beat at the same moment, submit the same pipeline again, which changes nothing.
What was missed while no beat ran is submitted once, for the last time that was due.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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
_MOST_ERROR: Final = 500


class Schedules(threading.Thread):
    """Looks for what is due until the process ends. `clock` is the time of the fleet, in Unix seconds."""

    def __init__(
        self, app: GPUFlow, clock: Callable[[], float] | None = None, poll_seconds: float = POLL_SECONDS
    ) -> None:
        super().__init__(name="gpuflow-schedules", daemon=True)
        self._app = app
        self._store = ScheduleStore(app.redis, app.keys)
        self._clock = clock or self._store.now
        self._poll_seconds = poll_seconds
        self._stop_event = threading.Event()
        self._unreadable: set[str] = set()

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
        for name, text in texts.items():
            try:
                schedule = Schedule.from_json(name, text)
                due = schedule.parsed().last_until(now)
            except (GPUFlowError, ValueError, KeyError, TypeError) as error:
                if text not in self._unreadable:
                    self._unreadable.add(text)
                    log.error("schedule_unreadable", schedule=name, cause=f"{type(error).__name__}: {error}")
                continue
            before = runs.get(name, LastRun()).due
            # A run that lies ahead was noted while the clock was wrong: what it hides was submitted, or is now.
            if due is None or due <= max(schedule.created_at, before if before <= now else 0.0):
                continue
            pipeline = self._submit(schedule, due)
            if pipeline:
                done.append(pipeline)
        return done

    def _submit(self, schedule: Schedule, due: float) -> str:
        """Submit a schedule for a time; one that cannot be submitted now is tried again, a bad one at its next time."""
        at = datetime.fromtimestamp(due, UTC).strftime("%Y-%m-%dT%H:%MZ")
        key = f"schedule:{schedule.name}:{at}"
        try:
            template = Template.from_dict(schedule.template)
            run = submit_pipeline(
                template, idempotency_key=key, owner=schedule.owner or None, uploads=False, app=self._app
            )
        except BrokerUnavailable:
            raise
        except ArtifactError as error:
            log.warning("schedule_not_submitted", schedule=schedule.name, due=at, cause=str(error))
            return ""
        except (GPUFlowError, ValueError, KeyError, TypeError) as error:
            log.error("schedule_failed", schedule=schedule.name, due=at, cause=str(error))
            self._store.note(schedule.name, LastRun(due=due, error=f"{type(error).__name__}: {error}"[:_MOST_ERROR]))
            return ""
        self._store.note(schedule.name, LastRun(due=due, pipeline=run.id))
        log.info("schedule_submitted", schedule=schedule.name, due=at, pipeline=run.id)
        return run.id


def start(app: GPUFlow) -> None:
    """Start the schedules of a beat process."""
    Schedules(app).start()
