"""Which failures are tried again, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.ledger.retries import MAX_BACKOFF_SECONDS, Again, End, decide
from gpuflow.ledger.states import TaskState


def failure(retryable: bool = True) -> dict[str, Any]:
    return {"type": "OutOfMemory", "message": "full", "retryable": retryable}


def test_what_no_attempt_can_mend_fails_at_once() -> None:
    assert decide(failure(retryable=False), 0, None) == End(state=TaskState.FAILED, error=failure(retryable=False))


def test_three_attempts_are_the_default_and_then_it_is_dead() -> None:
    assert isinstance(decide(failure(), 0, None), Again)
    assert isinstance(decide(failure(), 1, None), Again)
    end = decide(failure(), 2, None)
    assert isinstance(end, End)
    assert (end.state, end.error["attempts"]) == (TaskState.DEAD, 3)


def test_one_attempt_means_no_retry() -> None:
    end = decide(failure(), 0, {"max_attempts": 1})
    assert isinstance(end, End)
    assert end.state is TaskState.DEAD


@pytest.mark.parametrize(("failures", "low", "high"), [(0, 5, 10), (1, 10, 20), (2, 20, 40), (20, 300, 600)])
def test_the_wait_doubles_and_is_drawn_from_its_upper_half(failures: int, low: float, high: float) -> None:
    def wait(jitter: float) -> float:
        decision = decide(failure(), failures, {"max_attempts": 100}, jitter=lambda: jitter)
        assert isinstance(decision, Again)
        return decision.delay_seconds

    assert (wait(0.0), wait(1.0)) == (low, high)


@given(
    failures=st.integers(0, 98),
    base=st.floats(0, 604_800),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_the_wait_is_never_absurd(failures: int, base: float, jitter: float) -> None:
    decision = decide(failure(), failures, {"max_attempts": 100, "backoff_seconds": base}, jitter=lambda: jitter)
    assert isinstance(decision, Again)
    assert 0 <= decision.delay_seconds <= max(MAX_BACKOFF_SECONDS, base)


def test_no_wait_where_none_is_wanted() -> None:
    assert decide(failure(), 0, {"backoff_seconds": 0}) == Again(delay_seconds=0)
