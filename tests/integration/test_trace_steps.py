"""Which spans each step on a record sends: each once, by the process whose step it was. The real Lua, no workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit, submit_pipeline
from gpuflow.ledger.ledger import MAX_LOSSES
from gpuflow.ledger.states import TaskState
from gpuflow.traces.recording import Traces
from gpuflow.traces.spans import SpanData
from tests.support.fleet import TestFleet
from tests.support.pops import begin, lose


class Kept:
    """Stands for the exporter and keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[SpanData] = []

    def send(self, span: SpanData) -> None:
        self.spans.append(span)

    def sampled(self, _: int) -> bool:
        return True

    def current(self) -> None:
        return None

    def new_span_id(self) -> int:
        return 7

    def close(self) -> None:
        pass

    def told(self) -> list[tuple[str, object]]:
        """Return name and outcome or state of each span since this was asked last."""
        spans, self.spans = self.spans, []
        names = ("gpuflow.outcome", "gpuflow.state")
        return [(s.name, next((s.attributes[name] for name in names if name in s.attributes), None)) for s in spans]


@pytest.fixture(scope="module")
def brokered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """A broker without workers: the tests take their steps."""
    made = TestFleet(tmp_path_factory.mktemp("brokered"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def kept(brokered: TestFleet) -> Kept:
    """What the app of the fleet sends; it has a new one in each test, and a broker without tasks."""
    brokered.broker.client.flushdb()
    export = Kept()
    app: GPUFlow = brokered.app
    traces = Traces(lambda: app.redis, app.keys, export)  # type: ignore[arg-type]
    app.__dict__["traces"] = app.ledger.observer = app.pipelines.observer = traces
    return export


def test_a_lost_attempt_is_told_once_by_whoever_begins_the_next(brokered: TestFleet, kept: Kept) -> None:
    task = submit(brokered.echo(output=1), app=brokered.app)
    assert kept.told() == [("submit echo", None)]
    _, tag = begin(brokered, "a:1")
    assert kept.told() == [("queue", None)]
    lose(brokered.app.keys, brokered.broker.client, tag)

    second, _ = begin(brokered, "b:1")

    (lost,) = kept.spans
    assert (lost.error, lost.attributes["gpuflow.worker"], lost.attributes["gpuflow.attempt"]) == (
        "WorkerLost",
        "a:1",
        1,
    )
    assert kept.told() == [("attempt echo", "lost")]
    assert brokered.app.ledger.commit(task.id, TaskState.SUCCEEDED, holder=second, result={})
    assert brokered.app.ledger.commit(task.id, TaskState.SUCCEEDED, holder=second, result={})
    assert kept.told() == [("attempt echo", "succeeded"), ("task echo", "SUCCEEDED")]


def test_an_end_that_is_refused_has_no_span(brokered: TestFleet, kept: Kept) -> None:
    task = submit(brokered.echo(output=1), app=brokered.app)
    first, tag = begin(brokered, "a:1")
    lose(brokered.app.keys, brokered.broker.client, tag)
    begin(brokered, "b:1")
    kept.told()

    assert not brokered.app.ledger.commit(task.id, TaskState.SUCCEEDED, holder=first, result={})
    assert brokered.app.ledger.yield_attempt(task.id, first, tag, reason="preempted") == "refused"

    assert kept.told() == []


def test_who_cancels_a_lost_attempt_tells_of_it(brokered: TestFleet, kept: Kept) -> None:
    task = submit(brokered.echo(output=1), app=brokered.app)
    _, tag = begin(brokered, "a:1")
    lose(brokered.app.keys, brokered.broker.client, tag)
    kept.told()

    assert brokered.app.ledger.cancel(task.id) == ("cancelled", "CANCELLED")
    assert brokered.app.ledger.cancel(task.id)[0] == "final"

    assert kept.told() == [("attempt echo", "lost"), ("task echo", "CANCELLED")]


def test_a_task_that_takes_its_workers_down_ends_its_trace(brokered: TestFleet, kept: Kept) -> None:
    task = submit(brokered.echo(output=1), app=brokered.app)
    brokered.broker.client.hset(brokered.app.keys.task(task.id), "losses", MAX_LOSSES - 1)
    _, tag = begin(brokered, "a:1")
    lose(brokered.app.keys, brokered.broker.client, tag)
    kept.told()

    with pytest.raises(AssertionError):  # it does not begin
        begin(brokered, "b:1")

    assert task.state == "DEAD"
    assert kept.told() == [("attempt echo", "lost"), ("task echo", "DEAD")]


def test_a_message_that_was_lost_with_its_worker_is_told_by_who_restores_it(brokered: TestFleet, kept: Kept) -> None:
    task = submit(brokered.echo(output=1), app=brokered.app)
    _, tag = begin(brokered, "a:1")
    keys, client = brokered.app.keys, brokered.broker.client
    client.zrem(keys.leases, tag)
    client.hdel(keys.unacked, tag)
    client.hdel(keys.owners, tag)
    kept.told()

    assert brokered.app.ledger.restore(task.id, least_age_seconds=0) == "restored"
    assert kept.told() == [("attempt echo", "lost")]

    second, _ = begin(brokered, "b:1")
    assert second.attempt == 2 and kept.told() == [("queue", None)]


def test_a_retry_by_hand_is_another_span_of_the_same_trace(brokered: TestFleet, kept: Kept) -> None:
    task = submit(brokered.echo(output=1), app=brokered.app)
    ledger = brokered.app.ledger
    ends = []
    for attempt in (1, 2):
        holder, _ = begin(brokered, "a:1")
        assert holder.attempt == attempt
        assert ledger.commit(task.id, TaskState.FAILED, holder=holder, error={"type": "Bad", "message": "bad"})
        ends.append(next(span for span in kept.spans if span.name == "task echo"))
        assert kept.told()[-2:] == [("attempt echo", "failed"), ("task echo", "FAILED")]
        if attempt == 1:
            assert ledger.retry_task(task.id)

    first, second = ends
    assert first.context.trace_id == second.context.trace_id and first.context.span_id != second.context.span_id
    assert first.end <= second.start


def test_each_round_of_a_pipeline_is_told_once(brokered: TestFleet, kept: Kept) -> None:
    node = {"name": "a", "spec": {"taskType": "echo", "echo": {"output": 1}}}
    run = submit_pipeline(
        {"apiVersion": "gpuflow/v1", "kind": "Pipeline", "metadata": {"name": "p"}, "spec": {"stages": [node]}},
        app=brokered.app,
    )
    assert kept.told() == [("submit pipeline", None)]
    for _ in range(2):
        run.cancel()
        run.cancel()
        assert kept.told() == [("pipeline", "CANCELLED")]
        run.resume()
        kept.told()


def test_what_goes_wrong_with_a_span_harms_no_step(
    brokered: TestFleet, kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(kept, "send", broken)
    task = submit(brokered.echo(output=1), app=brokered.app)
    holder, _ = begin(brokered, "a:1")

    assert brokered.app.ledger.commit(task.id, TaskState.SUCCEEDED, holder=holder, result={})

    assert task.state == "SUCCEEDED" and "span_not_made" in caplog.text
