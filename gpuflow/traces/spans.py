"""The spans of tasks and pipelines, made from their records. Pure; needs no OpenTelemetry.

    submit                  in the process that submits; its parent is the caller's own span, if it has one
      pipeline              from submit to the end of the pipeline
        task                from submit to the final state
          queue             from when the task waits to the start of an attempt
          attempt           from its start to its end, or to when its worker was found lost
            prepare run commit

They hold ids, names and states, and of an error its type alone: no text of a template, result or message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from gpuflow.ledger.records import AttemptEntry
from gpuflow.traces.context import TraceContext, parse, span_id_of, trace_id_of

#: Fields of a task record that its spans are made from.
TASK_FIELDS: Final = (
    *("id", "state", "task_type", "owner", "queue", "attempt", "pipeline", "stage", "traceparent", "created_at"),
    *("requeued_at", "started_at", "finished_at", "error", "run", "merge_tokens"),
)
#: Fields of a pipeline record that its span is made from.
PIPELINE_FIELDS: Final = (
    *("id", "state", "owner", "epoch", "traceparent", "created_at", "resumed_at", "finished_at", "error"),
)
_FAILED_STATES: Final = ("FAILED", "DEAD")
_FAILED_OUTCOMES: Final = ("failed", "dead", "lost")
#: Types of errors are class names; anything else a child may have written into one is not shown.
_ERROR_TYPE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,99}")

Sampled = Callable[[int], bool]


@dataclass(frozen=True, kw_only=True)
class SpanData:
    """One ended span. Times are Unix seconds; `error` is the type of the error, "" for none."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    start: float
    end: float
    kind: Literal["internal", "producer", "consumer"] = "internal"
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    events: Sequence[tuple[str, float]] = ()
    error: str = ""
    links: Sequence[TraceContext] = ()


@dataclass(frozen=True, kw_only=True)
class TaskHead:
    """What the spans of a task need of its record. `life` tells the task from itself after a retry by hand."""

    id: str
    parent: TraceContext | None
    context: TraceContext
    attributes: Mapping[str, str | int]
    state: str
    attempt: int
    began_at: float
    started_at: float
    finished_at: float
    error: str = ""
    run: str = ""

    @classmethod
    def of(cls, raw: Mapping[str, str], sampled: Sampled) -> TaskHead:
        """Read the TASK_FIELDS of a record; `sampled` says whether a trace that begins here is recorded."""
        parent, life = parse(raw.get("traceparent")), raw.get("requeued_at", "")
        began_at = _seconds(life) or _seconds(raw.get("created_at"))
        shown = {
            "gpuflow.task.id": raw["id"],
            "gpuflow.task.type": raw.get("task_type"),
            "gpuflow.owner": raw.get("owner"),
            "gpuflow.queue": raw.get("queue"),
            "gpuflow.pipeline.id": raw.get("pipeline"),
            "gpuflow.stage": raw.get("stage"),
        }
        return cls(
            id=raw["id"],
            parent=parent,
            context=task_context(raw["id"], parent, life, sampled),
            attributes={name: value for name, value in shown.items() if value},
            state=raw.get("state", ""),
            attempt=int(raw.get("attempt") or 0),
            began_at=began_at,
            started_at=_seconds(raw.get("started_at")),
            finished_at=_seconds(raw.get("finished_at")),
            error=_error_type(raw.get("error")),
            run=raw.get("run", ""),
        )

    @property
    def task_type(self) -> str:
        """The task type, for names of spans."""
        return str(self.attributes.get("gpuflow.task.type", ""))

    def attempt_context(self, attempt: int) -> TraceContext:
        """Return the span of an attempt."""
        return self.context.with_span(span_id_of(self.id, "attempt", attempt))


def exact(head: TaskHead, entry: AttemptEntry) -> AttemptEntry:
    """Return an entry with the times of the record, where that is of the same attempt.

    Lua writes numbers in JSON with 14 digits, so an attempt would seem to end after its task, by some microseconds.
    """
    if entry.attempt != head.attempt or not head.started_at:
        return entry
    return replace(entry, started_at=head.started_at, ended_at=head.finished_at or entry.ended_at)


def task_context(task_id: str, parent: TraceContext | None, life: str, sampled: Sampled) -> TraceContext:
    """Return the span of a task: in the trace that it continues, or in one of its own."""
    return _continued(parent, task_id, sampled).with_span(span_id_of(task_id, "task", life))


def pipeline_context(pipeline_id: str, parent: TraceContext | None, epoch: int, sampled: Sampled) -> TraceContext:
    """Return the span of one round of a pipeline; its tasks are below it."""
    return _continued(parent, pipeline_id, sampled).with_span(span_id_of(pipeline_id, "pipeline", epoch))


def _continued(parent: TraceContext | None, record_id: str, sampled: Sampled) -> TraceContext:
    if parent is not None:
        return parent
    trace_id = trace_id_of(record_id)
    return TraceContext(trace_id=trace_id, span_id=0, sampled=sampled(trace_id))


def queue_span(head: TaskHead, attempt: int, since: float) -> SpanData:
    """Return how long the task waited for the attempt that its record names, `since` when."""
    return SpanData(
        name="queue",
        context=head.context.with_span(span_id_of(head.id, "queue", attempt)),
        parent=head.context,
        start=min(since, head.started_at),
        end=head.started_at,
        attributes={**head.attributes, "gpuflow.attempt": attempt},
    )


def attempt_span(head: TaskHead, entry: AttemptEntry, *, requeued: bool = False) -> SpanData:
    """Return the span of an ended attempt; with `requeued`, its task waits for another one."""
    error = _error_type(entry.error)
    return SpanData(
        name=f"attempt {head.task_type}",
        context=head.attempt_context(entry.attempt),
        parent=head.context,
        start=entry.started_at,
        end=entry.ended_at,
        kind="consumer",
        attributes={
            **head.attributes,
            "gpuflow.attempt": entry.attempt,
            "gpuflow.worker": entry.worker,
            "gpuflow.outcome": entry.outcome,
        },
        events=[(name, entry.ended_at) for name in _events(entry.outcome, error, requeued=requeued)],
        error=(error or "Failed") if entry.outcome in _FAILED_OUTCOMES else "",
    )


def _events(outcome: str, error: str, *, requeued: bool) -> list[str]:
    if outcome == "lost":
        return ["worker_lost"]
    if outcome == "preempted":
        return ["preempted"]
    if outcome == "failed" and requeued and "OutOfMemory" in error:
        return ["oom_retry"]
    return []


def phase_spans(head: TaskHead, entry: AttemptEntry, marks: Sequence[tuple[str, float]]) -> list[SpanData]:
    """Return the spans of the parts of an attempt; `marks`: the name of each, and its first second in the attempt."""
    parent = head.attempt_context(entry.attempt)
    starts = [min(entry.started_at + max(0.0, after), entry.ended_at) for _, after in marks]
    ends = [*starts[1:], entry.ended_at][: len(starts)]
    return [
        SpanData(
            name=name,
            context=head.context.with_span(span_id_of(head.id, name, entry.attempt)),
            parent=parent,
            start=start,
            end=end,
            attributes={"gpuflow.task.id": head.id, "gpuflow.attempt": entry.attempt},
        )
        for (name, _), start, end in zip(marks, starts, ends, strict=True)
    ]


def task_span(head: TaskHead, *, run: TraceContext | None = None) -> SpanData:
    """Return the span of an ended task; `run` is that of the run of merged calls that has answered it."""
    failed = head.state in _FAILED_STATES
    return SpanData(
        name=f"task {head.task_type}",
        context=head.context,
        parent=head.parent,
        start=head.began_at,
        end=max(head.began_at, head.finished_at),
        attributes={**head.attributes, "gpuflow.state": head.state, "gpuflow.attempt": head.attempt},
        error=(head.error or "Failed") if failed else "",
        links=() if run is None else (run,),
    )


def pipeline_span(raw: Mapping[str, str], sampled: Sampled) -> SpanData:
    """Return the span of an ended pipeline, from the PIPELINE_FIELDS of its record."""
    parent = parse(raw.get("traceparent"))
    began_at = _seconds(raw.get("resumed_at")) or _seconds(raw.get("created_at"))
    shown = {
        "gpuflow.pipeline.id": raw["id"],
        "gpuflow.owner": raw.get("owner", ""),
        "gpuflow.state": raw["state"],
    }
    return SpanData(
        name="pipeline",
        context=pipeline_context(raw["id"], parent, int(raw.get("epoch") or 1), sampled),
        parent=parent,
        start=began_at,
        end=max(began_at, _seconds(raw.get("finished_at"))),
        attributes={name: value for name, value in shown.items() if value},
        error=(_error_type(raw.get("error")) or "Failed") if raw["state"] in _FAILED_STATES else "",
    )


def _seconds(text: str | None) -> float:
    return float(text) if text else 0.0


def _error_type(error: str | Mapping[str, object] | None) -> str:
    """Return the type of an error record, JSON or read; "" for none that is a class name."""
    found = json.loads(error) if isinstance(error, str) and error else error
    name = found.get("type") if isinstance(found, Mapping) else None
    return name if isinstance(name, str) and _ERROR_TYPE.fullmatch(name) else ""
