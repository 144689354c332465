"""Handles on tasks and pipelines: watch, wait, result, cancel, retry, resume.

Everything is read from the records in Redis, so a handle works from any process, and interrupting a wait cancels
nothing. Waiting uses the event streams. Made by `gpuflow.client`; the asynchronous forms wait in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Final, Protocol

from kombu.exceptions import OperationalError
from redis.exceptions import OutOfMemoryError, RedisError

from gpuflow.artifacts.references import References
from gpuflow.artifacts.task_access import client_hosts
from gpuflow.broker.answers import Meaning, meaning_of
from gpuflow.celery_app import GPUFlow
from gpuflow.celery_app import app as default_app
from gpuflow.errors import BrokerUnavailable, TaskCancelled, TaskDead, TaskFailed, unreachable_text
from gpuflow.ledger.eventlog import EventCursor, LoggedEvent
from gpuflow.ledger.records import AttemptEntry, TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.pipelines.collect import all_found, result_of_tasks
from gpuflow.pipelines.controller import RECONCILE_TASK
from gpuflow.pipelines.records import PipelineRecord, PipelineState, StageRecord
from gpuflow.protocol import FUNCTION_TYPE
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.spec import Template

#: Between two looks of the async forms, which grow while nothing comes.
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 0.5


class ProgressView(Protocol):
    """Shows a pipeline or task while somebody waits for it."""

    def show(self, event: LoggedEvent) -> None:
        """Take one event."""

    def close(self) -> None:
        """The wait has ended."""


class _Events:
    """Events as an iterator and as an async iterator; ends when the work has ended.

    `follow(block)` yields events, and None where nothing has come: after a second with `block`, else at once.
    """

    def __init__(self, follow: Callable[[bool], Iterator[LoggedEvent | None]]) -> None:
        self._follow = follow

    def __iter__(self) -> Iterator[LoggedEvent]:
        return (event for event in self._follow(True) if event is not None)

    async def __aiter__(self) -> AsyncIterator[LoggedEvent]:
        # No thread is held between two looks: a loop has few, and cannot close while one of them waits.
        found, end = self._follow(False), object()
        pause = _FIRST_PAUSE_SECONDS
        while (event := await asyncio.to_thread(next, found, end)) is not end:
            if event is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                pause = _FIRST_PAUSE_SECONDS
                yield event  # type: ignore[misc]


class Task:
    """A handle on one task."""

    def __init__(self, task_id: str, app: GPUFlow | None = None) -> None:
        self.id = task_id
        self._app = app or default_app

    def __repr__(self) -> str:
        return f"<Task {self.id}>"

    def record(self) -> TaskRecord:
        """Return the task's record. Raises UnknownTask, BrokerUnavailable."""
        with reachable():
            (record,) = self._app.ledger.as_seen([self._app.ledger.get(self.id)])
        return record

    def status(self) -> dict[str, Any]:
        """Return state, queue, attempt, worker, times, progress and error as plain data."""
        return self.record().public()

    @property
    def state(self) -> TaskState:
        """The task's state."""
        return self.record().state

    @property
    def result(self) -> Any:
        """The committed result, large fields loaded; None until the task has succeeded. Raises ArtifactError."""
        record = self.record()
        references = References(self._app.settings, hosts=client_hosts(self._app.settings))
        return None if record.result is None else _loaded(record, references)

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the end and return the result; `timeout` in seconds.

        Raises TaskFailed, TaskCancelled, TaskDead, ArtifactError (a large field cannot be loaded); TimeoutError when it
        has not ended in time (the task goes on).
        """
        for _ in self._follow(timeout):
            pass
        return self._outcome(timeout)

    def _outcome(self, timeout: float | None = None) -> Any:
        record = self.record()
        if not record.state.final:
            raise TimeoutError(f"task {self.id} is {record.state} after {timeout or 0:g} s")
        raise_unless_succeeded(record)
        return _loaded(record, References(self._app.settings, hosts=client_hosts(self._app.settings)))

    def wait(self, timeout: float | None = None) -> TaskRecord:
        """Wait for the end, whatever it is, and return the record; after `timeout` seconds as it is then."""
        for _ in self._follow(timeout):
            pass
        return self.record()

    def events(self) -> _Events:
        """Return the events from the first on, for `for` and `async for`; they end with the task."""
        return _Events(lambda block: self._follow(None, block=block))

    def attempts(self) -> list[AttemptEntry]:
        """Return how each ended attempt went, the first one first. Raises BrokerUnavailable.

        A call that was merged into a run has those of the run.
        """
        with reachable():
            ledger = self._app.ledger
            record = ledger.find(self.id)
            waits_for = record.run if record is not None and record.state is TaskState.MERGED else None
            return ledger.attempts(waits_for or self.id)

    def cancel(self) -> str:
        """Cancel; returns `cancelled`, `requested` (its worker stops it now) or `final`."""
        with reachable():
            return self._app.cancel_task(self.id)

    def retry(self) -> bool:
        """Queue an ended task that has not succeeded again; False if there is nothing to retry."""
        with reachable():
            return self._app.ledger.retry_task(self.id)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        async for _ in self.events():
            pass
        return await asyncio.to_thread(self._outcome)

    def _follow(self, timeout: float | None, *, block: bool = True) -> Iterator[LoggedEvent | None]:
        deadline = None if timeout is None else time.monotonic() + timeout
        cursor = EventCursor(self._app.event_log, [self.id])
        while True:
            with reachable():
                ended = self._app.ledger.get(self.id).state.final
                events = cursor.wait(_slice(deadline) if block and not ended else 0.001)
            yield from events or (None,)
            if (ended and not events) or (deadline is not None and time.monotonic() >= deadline):
                return


def _loaded(record: TaskRecord, references: References) -> Any:
    """Return a result, large fields loaded. Of a function it is as the function has returned it."""
    result = record.result or {}
    return result if record.task_type == FUNCTION_TYPE else references.fields(result)


class StageView:
    """One stage of a pipeline run, as `run["name"]`."""

    def __init__(self, run: PipelineRun, record: StageRecord) -> None:
        self._run = run
        self.record = record

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.record.name

    @property
    def state(self) -> str:
        """The stage's state."""
        return str(self.record.state)

    @property
    def tasks(self) -> list[Task]:
        """The tasks of its current round that have been sent, in order."""
        with reachable():
            found = self._run.app.ledger.find_many(self.record.tasks)
        return [Task(record.id, self._run.app) for record in found if record is not None]

    @property
    def result(self) -> dict[str, Any] | None:
        """The stage's result, large fields loaded; None until it has succeeded. Raises ArtifactError."""
        if self.state != "SUCCEEDED":
            return None
        with reachable():
            tasks = all_found(self.name, self._run.app.ledger.find_many(self.record.tasks))
        references = References(self._run.app.settings, hosts=client_hosts(self._run.app.settings))
        return result_of_tasks(tasks, [_loaded(task, references) for task in tasks], references.load)


class PipelineRun:
    """A handle on one pipeline."""

    def __init__(self, pipeline_id: str, app: GPUFlow | None = None) -> None:
        self.id = pipeline_id
        self.app = app or default_app

    def __repr__(self) -> str:
        return f"<PipelineRun {self.id}>"

    def record(self) -> PipelineRecord:
        """Return the pipeline's record. Raises UnknownTask, BrokerUnavailable."""
        with reachable():
            return self.app.pipelines.get(self.id)

    def template(self) -> Template:
        """Return the template that was submitted."""
        return Template.from_dict(self.record().template)

    def __getitem__(self, stage: str) -> StageView:
        record = self.record()
        names = [item.name for item in Template.from_dict(record.template).stages]
        if stage not in names:
            raise KeyError(f"pipeline {self.id} has no stage {stage!r}; it has {', '.join(names)}")
        return StageView(self, record.stage(stage))

    @property
    def state(self) -> PipelineState:
        """The pipeline's state."""
        return self.record().state

    def status(self) -> dict[str, Any]:
        """Return state, times, error, and each stage with its tasks, as plain data."""
        record = self.record()
        stages = Template.from_dict(record.template).stages
        ledger = self.app.ledger
        with reachable():
            tasks = {
                stage.name: [task.public() for task in ledger.as_seen(ledger.find_many(record.stage(stage.name).tasks))]
                for stage in stages
            }
        return {
            **record.public(),
            "stages": [
                {
                    "name": stage.name,
                    "dependsOn": list(stage.depends_on),
                    "state": str(record.stage(stage.name).state),
                    "error": record.stage(stage.name).error,
                    "reason": record.stage(stage.name).reason,
                    "tasks": tasks[stage.name],
                }
                for stage in stages
            ],
        }

    def wait(
        self, timeout: float | None = None, progress: bool | ProgressView = False, *, check: bool = True
    ) -> PipelineRun:
        """Wait for the end. `progress=True` shows stages, steps and loss in the terminal or notebook.

        Raises TaskFailed or TaskCancelled unless `check` is False; TimeoutError after `timeout` seconds (the pipeline
        goes on). Interrupting it cancels nothing.
        """
        view: ProgressView | None = None
        if progress is True:
            from gpuflow.progress import TerminalProgress

            view = TerminalProgress(self)
        elif progress:
            view = progress
        try:
            for event in self._follow(timeout):
                if view is not None and event is not None:
                    view.show(event)
        finally:
            if view is not None:
                view.close()
        return self._outcome(timeout, check=check)

    def _outcome(self, timeout: float | None, *, check: bool) -> PipelineRun:
        record = self.record()
        if not record.state.final:
            raise TimeoutError(f"pipeline {self.id} is {record.state} after {timeout or 0:g} s")
        if check and record.state is PipelineState.CANCELLED:
            raise TaskCancelled(f"pipeline {self.id} was cancelled; `gpuflow resume {self.id}` goes on with the rest")
        if check and record.state is PipelineState.FAILED:
            error = dict(record.error or {})
            raise TaskFailed(str(error.get("message", "the pipeline failed")), error)
        return self

    def events(self) -> _Events:
        """Return the events of the pipeline and its tasks as they come; they end with the pipeline."""
        return _Events(lambda block: self._follow(None, block=block))

    def cancel(self) -> bool:
        """Cancel all that has not ended; False if the pipeline had ended before."""
        with reachable():
            ended = False
            while not ended and not (record := self.app.pipelines.get(self.id)).state.final:  # or resumed meanwhile
                names = [stage.name for stage in Template.from_dict(record.template).stages]
                ended = self.app.pipelines.end(self.id, PipelineState.CANCELLED, names, epoch=record.epoch)
            self.app.pipeline_controller.reconcile(self.id)
        return ended

    def resume(self) -> str:
        """Run what is not done: `resumed`, `running` (it had not ended) or `succeeded` (nothing is left)."""
        with reachable():
            verdict = self.app.pipelines.resume(self.id)
            if verdict != "succeeded":
                self.app.send_task(RECONCILE_TASK, args=(self.id,), queue=CONTROL_QUEUE, ignore_result=True)
        return verdict

    def __await__(self) -> Generator[Any, None, PipelineRun]:
        return self._awaited().__await__()

    async def _awaited(self) -> PipelineRun:
        async for _ in self.events():
            pass
        return await asyncio.to_thread(self._outcome, None, check=True)

    def _follow(self, timeout: float | None, *, block: bool = True) -> Iterator[LoggedEvent | None]:
        deadline = None if timeout is None else time.monotonic() + timeout
        cursor = EventCursor(self.app.event_log, [self.id])
        while True:
            with reachable():
                record = self.app.pipelines.get(self.id)
                for stage in record.stages.values():
                    for task_id in stage.tasks:
                        cursor.add(task_id)
                ended = record.state.final
                events = cursor.wait(_slice(deadline) if block and not ended else 0.001)
            yield from events or (None,)
            if (ended and not events) or (deadline is not None and time.monotonic() >= deadline):
                return


def _slice(deadline: float | None) -> float:
    return 1.0 if deadline is None else max(0.001, min(1.0, deadline - time.monotonic()))


class reachable:  # noqa: N801  (reads as a statement: with reachable(): ...)
    """Turns errors of an unreachable broker into BrokerUnavailable."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OutOfMemoryError):
            raise BrokerUnavailable(
                "the broker's memory is full, and nothing was written; raise its maxmemory, or wait until work is done"
            ) from error
        meaning = meaning_of(error) if isinstance(error, RedisError | OperationalError) else None
        if meaning is Meaning.WAIT:
            raise BrokerUnavailable(f"the broker refuses this for now ({error}); mend that, then try again") from error
        if meaning is Meaning.DENIED:
            raise BrokerUnavailable(
                f"the broker denies this to the user of REDIS_URL ({error}); check its password and its rights"
            ) from error
        if meaning is Meaning.AGAIN:
            raise BrokerUnavailable(unreachable_text(error)) from error


def raise_unless_succeeded(record: TaskRecord) -> None:
    """Raise the exception of a task that ended otherwise than SUCCEEDED."""
    error = dict(record.error or {})
    message = str(error.get("message") or f"task {record.id} ended {record.state}")
    if record.state is TaskState.CANCELLED:
        raise TaskCancelled(message)
    if record.state is TaskState.DEAD:
        raise TaskDead(message, error)
    if record.state is not TaskState.SUCCEEDED:
        raise TaskFailed(message, error)
