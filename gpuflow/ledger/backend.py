"""The result backend: Celery's Redis backend behind the fence of the ledger.

For a task with a record, nothing is stored, counted in a chord or passed to a link before the record says so: a
failure, time-out or revocation is first committed by compare-and-set, and a refused one leaves no trace. A task
without a record (a team's own Celery task) behaves as in stock Celery.
"""

from __future__ import annotations

import threading
from typing import Any

from celery.backends.redis import RedisBackend

from gpuflow.ledger.ledger import Ledger
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.routing.families import SUPERVISED_TASKS

log = get_logger("gpuflow.backend")


class Attempts:
    """Which attempt of which task this process runs; the supervisor writes, the backend reads."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()

    def begin(self, task_id: str, attempt: int) -> None:
        """Note that this process runs (or replays the end of) an attempt."""
        with self._lock:
            self._numbers[task_id] = attempt

    def end(self, task_id: str) -> None:
        """Forget the attempt."""
        with self._lock:
            self._numbers.pop(task_id, None)

    def of(self, task_id: str) -> int | None:
        """Return the attempt that this process runs, if any."""
        with self._lock:
            return self._numbers.get(task_id)


def error_record(error: BaseException, *, error_type: str | None = None, retryable: bool = False) -> dict[str, Any]:
    """Return the record of an error: `type`, `message`, `retryable`, and what a TaskFailed brings with it."""
    details = getattr(error, "details", None)
    if details:
        return dict(details)
    return {"type": error_type or type(error).__name__, "message": str(error), "retryable": retryable}


class LedgerBackend(RedisBackend):  # type: ignore[misc]
    """Celery results of the gpuflow app."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attempts: Attempts = self.app.attempts

    @property
    def ledger(self) -> Ledger:
        """The ledger of the app."""
        ledger: Ledger = self.app.ledger
        return ledger

    def mark_as_failure(
        self,
        task_id: str,
        exc: BaseException,
        traceback: Any = None,
        request: Any = None,
        store_result: bool = True,
        call_errbacks: bool = True,
        state: str = "FAILURE",
    ) -> Any:
        """Commit the failure to the record first; a superseded attempt leaves without store, chord part or errback."""
        if self._refused(task_id, request, TaskState.FAILED, exc):
            return None
        return super().mark_as_failure(
            task_id,
            exc,
            traceback=traceback,
            request=request,
            store_result=store_result,
            call_errbacks=call_errbacks,
            state=state,
        )

    def mark_as_revoked(
        self,
        task_id: str,
        reason: str = "",
        request: Any = None,
        store_result: bool = True,
        state: str = "REVOKED",
    ) -> Any:
        """Commit the cancellation to the record first, as `mark_as_failure` does."""
        if self._refused(task_id, request, TaskState.CANCELLED, RuntimeError(reason or "revoked")):
            return None
        return super().mark_as_revoked(task_id, reason=reason, request=request, store_result=store_result, state=state)

    def _refused(self, task_id: str, request: Any, state: TaskState, exc: BaseException) -> bool:
        name = getattr(request, "task", None) or getattr(request, "name", None)
        if name not in SUPERVISED_TASKS:
            return False
        attempt = self.attempts.of(task_id)
        wanted = self._state_for(exc, state)
        if self.ledger.commit(task_id, wanted, attempt=attempt, error=error_record(exc)):
            return False
        record = self.ledger.find(task_id)
        if record is not None and attempt is None and record.state == wanted:
            return False
        log.warning("late_end_refused", task=task_id, attempt=attempt, wanted=str(wanted))
        return True

    @staticmethod
    def _state_for(exc: BaseException, default: TaskState) -> TaskState:
        return {"TaskCancelled": TaskState.CANCELLED, "TaskDead": TaskState.DEAD}.get(type(exc).__name__, default)
