"""Makes spans of what happens to tasks and pipelines, as their steps in Redis succeed, and hands them to the exporter.

The process whose step ends something sends its span, so each is sent once: the worker of an attempt, the worker that
finds another one lost, the client that cancels. Times of tasks and attempts are those of the server's clock, which all
machines share. Spans are best effort: one whose process dies with it in the queue, or whose record cannot be read, is
missing.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, ParamSpec

import redis
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.ledger.ledger import StartVerdict
from gpuflow.ledger.records import AttemptEntry
from gpuflow.logs import get_logger
from gpuflow.settings import Settings
from gpuflow.traces.context import VARIABLE, TraceContext, continued_here, parse, trace_id_of
from gpuflow.traces.spans import (
    PIPELINE_FIELDS,
    TASK_FIELDS,
    SpanData,
    TaskHead,
    attempt_span,
    exact,
    phase_spans,
    pipeline_context,
    pipeline_span,
    queue_span,
    task_context,
    task_span,
)

if TYPE_CHECKING:
    from gpuflow.traces.exporting import SpanExport

log = get_logger("gpuflow.traces")

#: Attempts of this process of which it is remembered when they began; more than any worker runs at once.
_MOST_RUNNING: Final = 4096


P = ParamSpec("P")


def _harmless(step: Callable[P, None]) -> Callable[P, None]:
    """Let a method raise nothing: it is called in the middle of what tasks depend on."""

    @functools.wraps(step)
    def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            step(*args, **kwargs)
        except (RedisError, OSError) as error:
            log.debug("span_not_made", step=step.__name__, cause=str(error))
        except Exception:  # no span is worth a task
            log.exception("span_not_made", step=step.__name__)

    return tried


@dataclass(kw_only=True)
class _Running:
    """An attempt of this process: when it began here (monotonic seconds), and its parts since then."""

    head: TaskHead
    attempt: int
    began_at: float
    marks: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A submit that is under way: what goes into its record as `traceparent`, and its span, once it is sent."""

    traceparent: str = ""
    span: SpanData | None = None
    #: `traceparent` of the run of merged calls that a task may begin: it is below the task.
    for_run: str = ""


class Traces:
    """The spans of one app. Its methods raise nothing: no span is worth a task."""

    def __init__(self, client: Callable[[], redis.Redis], keys: Keys, export: SpanExport) -> None:
        self._connect = client
        self._keys = keys
        self._export = export
        self._running: OrderedDict[str, _Running] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def _client(self) -> Any:
        return self._connect()

    def close(self) -> None:
        """Send what waits, for a moment."""
        self._export.close()

    def flush(self) -> None:
        """Send what waits, now."""
        self._export.flush()

    # -- submit -------------------------------------------------------------------------------------------------

    def begin_submit(self, record_id: str, what: str, attributes: Mapping[str, str]) -> Submission:
        """Return the submit of a task or pipeline: below the caller's own span, or the first of a trace of its own."""
        caller = self._export.current() or continued_here()
        trace_id = trace_id_of(record_id) if caller is None else caller.trace_id
        sampled = self._export.sampled(trace_id) if caller is None else caller.sampled
        context = TraceContext(trace_id=trace_id, span_id=self._export.new_span_id(), sampled=sampled)
        now = time.time()
        span = SpanData(
            name=f"submit {what}",
            context=context,
            parent=caller,
            start=now,
            end=now,
            kind="producer",
            attributes={name: value for name, value in attributes.items() if value},
        )
        return Submission(traceparent=context.header(), span=span)

    @_harmless
    def submitted(self, submission: Submission) -> None:
        """Send the span of a submit that has been sent."""
        if submission.span is not None:
            began = submission.span
            self._send(SpanData(**{**vars(began), "end": max(began.start, time.time())}))

    def sampled(self, trace_id: int) -> bool:
        """Whether a trace that begins here is recorded."""
        return self._export.sampled(trace_id)

    # -- what the ledger has done -------------------------------------------------------------------------------

    @_harmless
    def started(self, task_id: str, verdict: StartVerdict) -> None:
        """Note that an attempt has begun here, or that this delivery has found one lost."""
        begins = verdict.verdict == "begin"
        if self._is_running(task_id, verdict.attempt) if begins else not verdict.lost:
            return  # the same answer again, or nothing that has begun or ended
        began_at = time.monotonic()
        head, entry = self._read(task_id, verdict.lost)
        if head is None:
            return
        if entry is not None:
            self._send(attempt_span(head, entry))
        if not begins:
            self._send(task_span(head))
            return
        if verdict.queued_since:
            self._send(queue_span(head, verdict.attempt, verdict.queued_since))
        with self._lock:
            self._running[task_id] = _Running(head=head, attempt=verdict.attempt, began_at=began_at)
            self._running.move_to_end(task_id)
            while len(self._running) > _MOST_RUNNING:
                self._running.popitem(last=False)

    @_harmless
    def requeued(self, task_id: str, attempt: int) -> None:
        """Note that an attempt has ended and its task waits again."""
        head, entry = self._read(task_id, attempt)
        if head is not None and entry is not None:
            self._end_attempt(head, entry, requeued=True)

    @_harmless
    def lost(self, task_id: str, attempt: int) -> None:
        """Note that an attempt was found lost, and its task waits again."""
        head, entry = self._read(task_id, attempt)
        if head is not None and entry is not None:
            self._send(attempt_span(head, entry))

    @_harmless
    def ended(self, task_id: str, attempt: int = 0) -> None:
        """Note that a task has ended, by its attempt, or without one (0)."""
        head, entry = self._read(task_id, attempt)
        if head is None:
            return
        if entry is not None:
            self._end_attempt(head, entry)
        self._send(task_span(head))

    @_harmless
    def calls_ended(self, task_ids: Sequence[str], run_id: str) -> None:
        """Note that callers of a run of merged calls have ended, as far as they have; each is linked to the run."""
        heads = self._heads([run_id, *task_ids])
        for caller in heads[1:]:
            if caller.run == run_id and caller.finished_at:
                self._send(task_span(caller, run=heads[0].context))

    @_harmless
    def pipeline_ended(self, pipeline_id: str) -> None:
        """Note that a pipeline has ended."""
        raw = _with_values(PIPELINE_FIELDS, self._client.hmget(self._keys.pipeline(pipeline_id), PIPELINE_FIELDS))
        if raw.get("state"):
            self._send(pipeline_span(raw, self._export.sampled))

    # -- the parts of an attempt --------------------------------------------------------------------------------

    @_harmless
    def mark(self, task_id: str, attempt: int, part: str) -> None:
        """Note that an attempt of this process is now at `part`: prepare, run or commit."""
        with self._lock:
            running = self._running.get(task_id)
            if running is not None and running.attempt == attempt:
                running.marks.append((part, time.monotonic() - running.began_at))

    def variables(self, task_id: str, attempt: int) -> dict[str, str]:
        """Return what the child of an attempt of this process is told of its trace: nothing but ids."""
        with self._lock:
            running = self._running.get(task_id)
        if running is None or running.attempt != attempt:
            return {}
        return {VARIABLE: running.head.attempt_context(attempt).header()}

    def _is_running(self, task_id: str, attempt: int) -> bool:
        with self._lock:
            running = self._running.get(task_id)
        return running is not None and running.attempt == attempt

    def _end_attempt(self, head: TaskHead, entry: AttemptEntry, *, requeued: bool = False) -> None:
        with self._lock:
            running = self._running.get(head.id)
            if running is not None and running.attempt == entry.attempt:
                del self._running[head.id]
            else:
                running = None
        if running is not None:
            for span in phase_spans(head, entry, running.marks):
                self._send(span)
        self._send(attempt_span(head, entry, requeued=requeued))

    # -- records ------------------------------------------------------------------------------------------------

    def _read(self, task_id: str, attempt: int) -> tuple[TaskHead | None, AttemptEntry | None]:
        """Return a record, and how one of its attempts went, in one round trip; None for what is not there."""
        pipe = self._client.pipeline(transaction=False)
        pipe.hmget(self._keys.task(task_id), TASK_FIELDS)
        pipe.hget(self._keys.attempts(task_id), str(attempt))
        values, entry = pipe.execute()
        raw = _with_values(TASK_FIELDS, values)
        if not raw.get("state"):
            return None, None
        head = TaskHead.of(raw, self._export.sampled)
        return head, exact(head, AttemptEntry.from_json(entry)) if entry else None

    def _heads(self, task_ids: Sequence[str]) -> list[TaskHead]:
        """Return the records that there are; none at all without the first."""
        pipe = self._client.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hmget(self._keys.task(task_id), TASK_FIELDS)
        found = [_with_values(TASK_FIELDS, values) for values in pipe.execute()]
        if not found[0].get("state"):
            return []
        return [TaskHead.of(raw, self._export.sampled) for raw in found if raw.get("state")]

    def _send(self, span: SpanData) -> None:
        self._export.send(span)


def of_submit(
    traces: Traces | None,
    task_id: str,
    given: str,
    *,
    what: str,
    attributes: Mapping[str, str],
) -> Submission:
    """Return the submit of a task: in the trace `given` to it, else below the caller's span, or in one of its own.

    Without traces only what was given is handed on.
    """
    parent = parse(given) or (continued_here() if traces is None else None)
    if parent is not None:
        made = Submission(traceparent=parent.header())
    elif traces is not None:
        made = traces.begin_submit(task_id, what, attributes)
    else:
        return Submission()
    below = task_context(task_id, parse(made.traceparent), "", _recorded)
    return Submission(traceparent=made.traceparent, span=made.span, for_run=below.header())


def traceparent_of_tasks(pipeline_id: str, given: str, epoch: int, traces: Traces | None) -> str:
    """Return the `traceparent` of the tasks of one round of a pipeline: its span; "" where nobody asked for a trace.

    `given` is that of the pipeline itself.
    """
    parent = parse(given)
    if parent is None and traces is None:
        return ""
    sampled = traces.sampled if traces is not None else _recorded
    return pipeline_context(pipeline_id, parent, epoch, sampled).header()


def _recorded(_: int) -> bool:
    """Stands where the trace is another one's, so that nothing is to be decided."""
    return True


def begin_traces(settings: Settings, client: Callable[[], redis.Redis], keys: Keys) -> Traces | None:
    """Return what makes spans, as GPUFLOW_TRACES says; None for none, also where the SDK cannot begin."""
    if settings.traces == "none":
        return None
    try:
        from gpuflow.traces.exporting import SpanExport
    except ImportError as error:
        log.warning("traces_not_available", cause=str(error), mend="pip install 'gpuflow[traces]'")
        return None
    try:
        return Traces(client, keys, SpanExport())
    except Exception as error:  # noqa: BLE001  (whatever an OTEL_* variable says, tasks run)
        log.warning("traces_not_available", cause=str(error), mend="check the OTEL_* variables of this process")
        return None


def _with_values(names: Sequence[str], values: Sequence[str | None]) -> dict[str, str]:
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


__all__ = ["Submission", "Traces", "begin_traces", "of_submit", "traceparent_of_tasks"]
