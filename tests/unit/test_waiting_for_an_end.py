"""How a handle waits for the end of its task: by its events, and by its record alone where that says more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from gpuflow.handles import Task
from gpuflow.ledger.eventlog import LoggedEvent
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState

WAITS, RUNS, ENDED = TaskState.QUEUED, TaskState.RUNNING, TaskState.SUCCEEDED


def event(number: int, name: str = "state", **data: Any) -> LoggedEvent:
    return LoggedEvent(id=f"{number}-0", source="t", name=name, data=data)


class Fleet:
    """An app whose record has these states, one a read, the last one from then on, and whose events come in batches."""

    def __init__(self, states: Iterable[TaskState], batches: Iterable[list[LoggedEvent]] = ()) -> None:
        self._states, self._batches = list(states), iter(batches)
        self.reads = 0
        self.positions: list[str] = []
        self.ledger = self.event_log = self
        self.settings = SimpleNamespace()

    def get(self, task_id: str) -> TaskRecord:
        state = self._states[min(self.reads, len(self._states) - 1)]
        self.reads += 1
        return TaskRecord.from_hash({"id": task_id, "state": str(state)})

    def as_seen(self, records: list[TaskRecord]) -> list[TaskRecord]:
        return records

    def wait(self, positions: Mapping[str, str], timeout_seconds: float) -> list[LoggedEvent]:
        self.positions.append(positions["t"])
        return next(self._batches, [])

    def task(self) -> Task:
        return Task("t", self)  # type: ignore[arg-type]


def test_a_task_that_has_ended_is_read_once() -> None:
    fleet = Fleet([ENDED])
    assert fleet.task().wait().state is ENDED
    assert (fleet.reads, fleet.positions) == (1, [])


def test_what_ends_nothing_is_no_reason_to_read_the_record() -> None:
    began = [event(1, state="QUEUED"), event(2, state="STARTING")]
    ended = [event(4, state="SUCCEEDED")]
    fleet = Fleet([WAITS, ENDED], [began, [event(3, "log", message="state SUCCEEDED")], ended])
    assert fleet.task().wait().state is ENDED
    assert (fleet.reads, fleet.positions) == (2, ["0", "2-0", "3-0"])


def test_a_silent_moment_is_one() -> None:
    """An end whose event was lost, or that was written by an older version."""
    fleet = Fleet([RUNS, RUNS, ENDED], [[], []])
    assert fleet.task().wait().state is ENDED
    assert fleet.reads == 3


def test_the_end_of_an_earlier_life_is_none() -> None:
    fleet = Fleet([RUNS, RUNS, ENDED], [[event(1, state="FAILED")], [event(2, state="SUCCEEDED")]])
    assert fleet.task().wait().state is ENDED
    assert (fleet.reads, fleet.positions) == (3, ["0", "1-0"])


def test_after_the_time_it_is_as_it_is_then() -> None:
    assert Fleet([RUNS]).task().wait(0).state is RUNS
    with pytest.raises(TimeoutError, match="is RUNNING after 0 s"):
        Fleet([RUNS]).task().get(0)
