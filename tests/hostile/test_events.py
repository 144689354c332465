"""A flood of events: what one attempt may tell is bounded by size, by bytes and by count a second."""

from __future__ import annotations

from gpuflow.worker import event_budget
from gpuflow.worker.event_budget import EventBudget


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_event_that_is_too_large_is_left_out() -> None:
    budget = EventBudget(Clock())

    assert not budget.takes(event_budget.MAX_EVENT_BYTES + 1)
    assert budget.takes(event_budget.MAX_EVENT_BYTES)
    assert (budget.dropped, budget.dropped_bytes) == (1, event_budget.MAX_EVENT_BYTES + 1)


def test_many_bytes_are_bounded_by_the_second() -> None:
    clock = Clock()
    budget = EventBudget(clock)
    size = 1 << 18

    assert sum(budget.takes(size) for _ in range(1000)) * size == event_budget.BURST_BYTES
    clock.now += 1
    assert sum(budget.takes(size) for _ in range(1000)) * size == event_budget.BYTES_PER_SECOND


def test_many_small_events_are_bounded_by_the_second() -> None:
    clock = Clock()
    budget = EventBudget(clock)

    assert sum(budget.takes(10) for _ in range(100_000)) == event_budget.BURST_EVENTS
    clock.now += 1
    assert sum(budget.takes(10) for _ in range(100_000)) == event_budget.EVENTS_PER_SECOND
