"""The spans of a task, made from its record: ids, parents, attributes, events, and no text of anybody."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gpuflow.ledger.records import AttemptEntry
from gpuflow.traces.context import continuing, parse, span_id_of, trace_id_of
from gpuflow.traces.recording import of_submit, traceparent_of_tasks
from gpuflow.traces.spans import (
    TaskHead,
    attempt_span,
    exact,
    phase_spans,
    pipeline_context,
    pipeline_span,
    queue_span,
    task_span,
)

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "hunter2-of-the-hub"


def always(_: int) -> bool:
    return True


def head(**more: Any) -> TaskHead:
    raw = {
        "id": "t1",
        "state": "SUCCEEDED",
        "task_type": "echo",
        "owner": "ana",
        "queue": "cpu",
        "attempt": "1",
        "created_at": "100",
        "started_at": "110.5",
        "finished_at": "130",
        **more,
    }
    return TaskHead.of(raw, always)


def entry(outcome: str, attempt: int = 1, **error: Any) -> AttemptEntry:
    return AttemptEntry(
        attempt=attempt, worker="w1", started_at=110.5, ended_at=130.0, outcome=outcome, error=error or None
    )


def test_a_task_without_a_caller_has_a_trace_of_its_own() -> None:
    span = task_span(head())

    assert span.parent is None
    assert (span.context.trace_id, span.context.span_id) == (trace_id_of("t1"), span_id_of("t1", "task"))
    assert (span.start, span.end, span.error) == (100.0, 130.0, "")


def test_a_task_continues_the_trace_of_its_caller() -> None:
    span = task_span(head(traceparent=CALLER))

    assert span.parent == parse(CALLER)
    assert span.context.trace_id == parse(CALLER).trace_id  # type: ignore[union-attr]
    assert span.context.span_id == span_id_of("t1", "task")


def test_a_trace_that_is_not_recorded_stays_so() -> None:
    assert not task_span(head(traceparent=CALLER[:-2] + "00")).context.sampled
    assert not TaskHead.of({"id": "t1", "state": "QUEUED"}, lambda _: False).context.sampled


def test_whoever_finds_an_attempt_lost_names_the_same_span() -> None:
    lost = attempt_span(head(), entry("lost", type="WorkerLost", message="worker w1 was lost"))

    assert lost.context.span_id == span_id_of("t1", "attempt", 1)
    assert lost.parent == head().context
    assert (lost.error, lost.events) == ("WorkerLost", [("worker_lost", 130.0)])
    assert attempt_span(head(), entry("lost", 2, type="WorkerLost")).context != lost.context


@pytest.mark.parametrize(
    ("outcome", "error", "requeued", "events", "failed"),
    [
        ("succeeded", "", False, [], ""),
        ("preempted", "WorkerLost", True, ["preempted"], ""),
        ("cancelled", "Cancelled", False, [], ""),
        ("failed", "OutOfMemory", True, ["oom_retry"], "OutOfMemory"),
        ("failed", "OutOfMemory", False, [], "OutOfMemory"),
        ("failed", "", True, [], "Failed"),
        ("dead", "ChildKilled", False, [], "ChildKilled"),
    ],
)
def test_the_outcome_of_an_attempt_decides_status_and_events(
    outcome: str, error: str, requeued: bool, events: list[str], failed: str
) -> None:
    given = {"type": error} if error else {}

    span = attempt_span(head(), entry(outcome, **given), requeued=requeued)

    assert ([name for name, _ in span.events], span.error) == (events, failed)
    assert span.attributes == {
        "gpuflow.task.id": "t1",
        "gpuflow.task.type": "echo",
        "gpuflow.owner": "ana",
        "gpuflow.queue": "cpu",
        "gpuflow.attempt": 1,
        "gpuflow.worker": "w1",
        "gpuflow.outcome": outcome,
    }


def test_the_parts_of_an_attempt_follow_each_other_to_its_end() -> None:
    spans = phase_spans(head(), entry("succeeded"), [("prepare", 0.0), ("run", 2.0), ("commit", 99.0)])

    assert [(span.name, span.start, span.end) for span in spans] == [
        ("prepare", 110.5, 112.5),
        ("run", 112.5, 130.0),
        ("commit", 130.0, 130.0),
    ]
    assert {span.parent for span in spans} == {head().attempt_context(1)}
    assert phase_spans(head(), entry("succeeded"), []) == []


def test_times_of_the_record_are_those_of_its_last_attempt() -> None:
    rounded = entry("succeeded")

    assert exact(head(started_at="110.500001", finished_at="129.999999"), rounded) == replace(
        rounded, started_at=110.500001, ended_at=129.999999
    )
    assert exact(head(attempt="2"), rounded) == rounded
    assert exact(head(finished_at=""), rounded).ended_at == 130.0


def test_the_wait_in_the_queue_ends_with_the_start() -> None:
    span = queue_span(head(), 1, 104.0)

    assert (span.start, span.end, span.parent) == (104.0, 110.5, head().context)


def test_no_text_of_a_record_is_in_a_span() -> None:
    error = {"type": f"Boom: {SECRET}", "message": SECRET, "retryable": False}
    full = head(state="FAILED", error=json.dumps(error), spec=SECRET, name=SECRET, labels=SECRET, result=SECRET)

    spans = [task_span(full), attempt_span(full, entry("failed", **error))]

    assert [span.error for span in spans] == ["Failed", "Failed"]
    assert SECRET not in repr(spans)


def test_a_retry_by_hand_is_a_second_span_of_the_task() -> None:
    again = task_span(head(requeued_at="120.25"))

    assert again.context.span_id != task_span(head()).context.span_id
    assert again.start == 120.25


def test_each_round_of_a_pipeline_is_a_span_and_its_tasks_are_below_it() -> None:
    raw = {"id": "p1", "state": "FAILED", "epoch": "2", "created_at": "1", "resumed_at": "5", "finished_at": "9"}
    span = pipeline_span({**raw, "traceparent": CALLER, "error": '{"type": "ChildDied"}'}, always)

    assert (span.start, span.end, span.error, span.parent) == (5.0, 9.0, "ChildDied", parse(CALLER))
    assert span.context == pipeline_context("p1", parse(CALLER), 2, always)
    assert traceparent_of_tasks("p1", CALLER, 2, None) == span.context.header()
    assert span.context != pipeline_context("p1", parse(CALLER), 1, always)


def test_without_traces_a_given_context_is_handed_on_and_none_is_made() -> None:
    assert of_submit(None, "t1", "", what="echo", attributes={}).traceparent == ""
    assert of_submit(None, "t1", "nonsense", what="echo", attributes={}).traceparent == ""
    assert traceparent_of_tasks("p1", "", 1, None) == ""

    handed_on = of_submit(None, "t1", CALLER, what="echo", attributes={})

    assert (handed_on.traceparent, handed_on.span) == (CALLER, None)
    assert parse(handed_on.for_run) == task_span(head(traceparent=CALLER)).context


def test_a_submit_continues_the_trace_of_its_request() -> None:
    with continuing(CALLER):
        inside = of_submit(None, "t1", "", what="echo", attributes={})
        given = of_submit(None, "t1", CALLER.replace("b7-01", "b8-01"), what="echo", attributes={})
    with continuing("nonsense"):
        assert of_submit(None, "t1", "", what="echo", attributes={}).traceparent == ""

    assert inside.traceparent == CALLER and given.traceparent.endswith("b8-01")
    assert of_submit(None, "t1", "", what="echo", attributes={}).traceparent == ""
