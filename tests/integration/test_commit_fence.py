"""START begins once for a call, COMMIT takes the end of the current attempt only: the real Lua, two processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuflow.client import submit
from gpuflow.ledger.states import TaskState
from tests.support.fleet import TestFleet
from tests.support.pops import begin, lose


@pytest.fixture(scope="module")
def brokered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """A broker without workers: the tests take their steps."""
    made = TestFleet(tmp_path_factory.mktemp("brokered"))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("by", ["another", "same"])
def test_an_earlier_attempt_cannot_commit(brokered: TestFleet, by: str) -> None:
    # Given a task whose first attempt has lost its lease, so that another process, or the same, has begun the second
    ledger = brokered.app.ledger
    task = submit(brokered.echo(output=1), app=brokered.app)
    first, tag = begin(brokered, "a:1")
    lose(brokered.app.keys, brokered.broker.client, tag)
    second, _ = begin(brokered, "b:1" if by == "another" else "a:1")
    assert (first.attempt, second.attempt) == (1, 2)
    # When the first brings its end, then nothing of it is taken, and the second commits its own
    for late in (TaskState.SUCCEEDED, TaskState.FAILED):
        assert not ledger.commit(task.id, late, holder=first, result={"by": 1})
    assert not task.record().state.final
    assert ledger.commit(task.id, TaskState.SUCCEEDED, holder=second, result={"by": 2})
    assert not ledger.commit(task.id, TaskState.SUCCEEDED, holder=first, result={"by": 1})
    record = task.record()
    assert (record.state, record.attempt, record.result) == ("SUCCEEDED", 2, {"by": 2})
    assert [entry.outcome for entry in ledger.attempts(task.id)] == ["lost", "succeeded"]


def test_only_the_worker_that_failed_last_passes_a_task_over(brokered: TestFleet) -> None:
    # Given a task that has failed on each of two workers, one after the other
    ledger = brokered.app.ledger
    task = submit(brokered.echo(output=1), app=brokered.app)
    for worker in ("a", "b"):
        holder, tag = begin(brokered, f"{worker}:1")
        error = {"type": "Bad", "message": "bad", "retryable": True}
        again = ledger.yield_attempt(
            task.id, holder, tag, reason="failed", error=error, avoid=worker, avoid_seconds=600
        )
        assert again == "queued"

    # Then the first one takes it again at once: left out by both, it would run nowhere
    third, _ = begin(brokered, "a:1")
    assert ledger.commit(task.id, TaskState.SUCCEEDED, holder=third, result={})
    assert third.attempt == 3
