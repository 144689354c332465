"""Runs calls of a team's own Celery tasks that are merged with equal ones: one run, by its record, for all its callers.

The function itself runs in a thread of the worker, as every plain task does. The record brings what a supervised task
has: one attempt at a time, one committed result. Called by `gpuflow.task`.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from celery.exceptions import Ignore
from celery.utils.time import maybe_iso8601

from gpuflow.broker.merged_calls import FETCH_HEADER, RUN_HEADER
from gpuflow.errors import TaskCancelled
from gpuflow.functions.calls import EXCEPTION
from gpuflow.ledger.ledger import Holder, StartVerdict
from gpuflow.ledger.records import TaskRecord, new_record_fields
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.merge.ends import CHILDREN, VALUE
from gpuflow.worker.runtime import Runtime, current
from gpuflow.worker.steps import until_answered

log = get_logger("gpuflow.merged_tasks")

_here = threading.local()

T = TypeVar("T")


def run(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one delivery of a recorded call, and return what the function returned.

    Raises what it raised; Ignore for a delivery that leaves no trace.
    """
    delivery = MergedTask(current(), task)
    _here.delivery = delivery
    try:
        return delivery.run(args, kwargs)
    finally:
        _here.delivery = None


def requeues_run(_name: str, _args: Any, _kwargs: Any, options: Mapping[str, Any]) -> bool:
    """Put the run that this thread works on back to its queue, if the call that is sent is its own retry."""
    delivery: MergedTask | None = getattr(_here, "delivery", None)
    return delivery is not None and options.get("task_id") == delivery.id and delivery.requeue(options)


class MergedTask:
    """One delivery of a caller or of a run."""

    def __init__(self, runtime: Runtime, task: Any) -> None:
        self.runtime = runtime
        self.task = task
        self.id: str = task.request.id
        self.tag: str = task.request.properties["delivery_tag"]
        self.is_run = bool(task.request.get(RUN_HEADER))
        self.ledger = runtime.app.ledger
        self.holder: Holder | None = None
        self.start_call = uuid.uuid4().hex

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """START, the function, COMMIT."""
        leases = self.runtime.leases
        started = self._until_told(self._start)
        if started.verdict == "merged":
            return self._fetch()
        if started.verdict == "final":
            return self._replay(self._record())
        if started.verdict != "begin":
            log.warning("delivery_dropped", task=self.id, why=started.verdict)
            if started.verdict not in ("live", "gone"):
                self._until_told(lambda: leases.settle(self.tag, "front"))
            raise Ignore
        self.holder = holder = Holder(attempt=started.attempt, token=leases.owner)
        self.runtime.app.attempts.begin(self.id, self.holder)
        leases.begin(self.tag, self.id, started.attempt)
        self._until_told(lambda: self.ledger.report(self.id, holder))
        value = self.task.backend.prepare_value(self.task.run(*args, **kwargs))
        result: dict[str, Any] = {VALUE: value}
        if self.is_run:
            calls = self._until_told(lambda: self.runtime.app.merger.store.calls(self.id))
            result = {CHILDREN: dict.fromkeys(calls, result)}
        if not self._until_told(lambda: self.ledger.commit(self.id, TaskState.SUCCEEDED, holder=holder, result=result)):
            log.warning("late_result_refused", task=self.id, attempt=holder.attempt)
            self._until_told(lambda: leases.settle(self.tag, "front"))
            raise Ignore
        return value

    def _start(self) -> StartVerdict:
        leases = self.runtime.leases
        return self.ledger.start(
            self.id,
            worker=self.runtime.worker_id,
            owner_token=leases.owner,
            tag=self.tag,
            new_fields=None if self.is_run else self._new_fields(),
            call=self.start_call,
            returned=leases.returned(self.tag),
            fetches=bool(self.task.request.get(FETCH_HEADER)),
        )

    def _new_fields(self) -> dict[str, str]:
        """Return the record of a caller whose record is gone: it runs by itself."""
        return new_record_fields(name=self.task.name, task_type=self.task.name, spec={}, requirement=None)

    def _record(self) -> TaskRecord:
        return self._until_told(lambda: self.ledger.get(self.id))

    def _until_told(self, step: Callable[[], T]) -> T:
        return until_answered(self.runtime.leases, self.tag, self.id, step)

    def _fetch(self) -> Any:
        """Return the end of a call that was merged into a run which has ended."""
        record = self._record()
        if record.state is TaskState.MERGED:
            self._until_told(lambda: self.runtime.app.merger.fetch(record))
            record = self._record()
        if not record.state.final:
            raise Ignore  # it waits for another run, or was queued again by hand
        return self._replay(record)

    def requeue(self, options: Mapping[str, Any]) -> bool:
        """End the attempt, and let the call wait again; False if it does not run here any more."""
        holder = self.holder
        if holder is None:
            return False
        self.runtime.leases.requeueing(self.tag)
        error = {"type": "Retry", "message": "the task has asked for a retry", "retryable": True}
        delay = _delay_seconds(options)
        answer = self._until_told(
            lambda: self.ledger.yield_attempt(
                self.id, holder, self.tag, reason="failed", error=error, delay_seconds=delay
            )
        )
        if answer != "queued":
            return False
        self.runtime.leases.forget(self.tag)
        return True

    def _replay(self, record: TaskRecord) -> Any:
        self.runtime.app.attempts.begin(self.id, Holder(attempt=record.attempt, token=""))
        if record.state is TaskState.SUCCEEDED:
            return None if self.is_run else (record.result or {}).get(VALUE)
        error = dict(record.error or {})
        if error.get(EXCEPTION):
            raise self.task.backend.exception_to_python(error[EXCEPTION])
        message = str(error.get("message") or f"the task is {record.state}")
        raise TaskCancelled(message) if record.state is TaskState.CANCELLED else RuntimeError(message)


def _delay_seconds(options: Mapping[str, Any]) -> float:
    eta = maybe_iso8601(options.get("eta"))
    if eta is not None:
        at: datetime = eta if eta.tzinfo else eta.replace(tzinfo=UTC)
        return max(0.0, (at - datetime.now(UTC)).total_seconds())
    return max(0.0, float(options.get("countdown") or 0))
