"""kill -9 of a worker at every point of a delivery: each task ends once, and what waits for it goes on once."""

from __future__ import annotations

import pytest

from tests.chaos.accounting import celery_end, check
from tests.chaos.chords import send_chord
from tests.chaos.conftest import LEASE, MORTAL
from tests.chaos.faults import POINTS, Fault
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually

HEADER = 3
#: Fewest and most attempts that the death costs. A worker whose child has gone may have begun with its next task.
LOSSES = {
    "popped": (0, 0),
    "recorded": (1, 1),
    "child_started": (1, 1),
    "running": (1, 1),
    "committing_before": (1, 2),
}


class Pair:
    """Two workers that may die; a dead one is replaced before the next test."""

    def __init__(self, fleet: TestFleet, fault: Fault) -> None:
        self.fleet = fleet
        self.fault = fault
        self._workers: dict[str, WorkerProcess] = {}

    def alive(self) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.process.poll() is None]

    def restore(self) -> None:
        for name in sorted({"w1", "w2"} - set(self.alive())):
            options = (*MORTAL, "--max-jobs", "1")
            self._workers[name] = self.fleet.start_worker(name, *options, env={**LEASE, **self.fault.env})


@pytest.fixture(scope="module")
def pair(long_fleet: TestFleet, long_fault: Fault) -> Pair:
    return Pair(long_fleet, long_fault)


@pytest.mark.parametrize("point", [point for point in POINTS if point != "joined"])
def test_a_chord_outlives_its_worker(long_fleet: TestFleet, pair: Pair, point: str) -> None:
    # Given two workers, the first of which to pass the point dies there
    pair.restore()
    pair.fault.arm(point)

    # When a chord of echo tasks flows through them
    sent = send_chord(long_fleet, HEADER, sleep_seconds=0.2)

    # Then one worker is dead, and all has happened once nevertheless
    eventually(pair.fault.struck, what=f"a worker dead at {point}")
    eventually(lambda: len(pair.alive()) == 1, what="one worker left")
    assert celery_end(long_fleet, sent.body, within=40) == list(range(HEADER))
    records = check(long_fleet, sent.header)
    assert sent.runs(long_fleet) == 1
    fewest, most = LOSSES.get(point, (0, 1))
    assert fewest <= sum(record.losses for record in records) <= most


def test_a_supervised_body_that_is_sent_twice_runs_once(long_fleet: TestFleet, pair: Pair) -> None:
    """Between body and bookkeeping of a chord nothing tells whether the body was sent, so it is sent again.

    A plain Celery task as the body may then run twice, as after any other death of its worker; a task with a record
    does not.
    """
    pair.restore()
    pair.fault.arm("joined")

    sent = send_chord(long_fleet, HEADER, supervised_body=True, sleep_seconds=0.2)

    eventually(pair.fault.struck, what="a worker dead when the body is sent")
    *_, body = check(long_fleet, [*sent.header, sent.body])
    # The dying worker may have begun with the body as well; nothing else costs it an attempt.
    assert body.attempt == 1 + body.losses <= 2
    assert body.result["output"] == "body"
