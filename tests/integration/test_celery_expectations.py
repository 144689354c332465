"""What a Celery user takes for granted of plain tasks, on a real worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery.exceptions import WorkerLostError

from tests.fixtures.fleets import OPTIONS
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """One broker for all tests of this file."""
    made = TestFleet(tmp_path_factory.mktemp("fleet"), options=OPTIONS)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def worker(fleet: TestFleet) -> WorkerProcess:
    return fleet.start_worker("w1", "--include", "plain_tasks", "-c", "2")


@pytest.mark.parametrize("how", ["exit", "cancelled", "interrupted"])
def test_a_task_that_ends_its_thread_fails_at_once_and_costs_no_slot(
    fleet: TestFleet, worker: WorkerProcess, how: str
) -> None:
    ends = [fleet.app.send_task("plain_tasks.end", args=(how,)) for _ in range(4)]

    for one in ends:
        with pytest.raises(WorkerLostError):
            one.get(timeout=patient(20))

    assert fleet.app.send_task("plain_tasks.add", args=(2, 3)).get(timeout=patient(20)) == 5
    assert worker.process.poll() is None


@pytest.mark.usefixtures("worker")
def test_a_message_that_comes_again_says_so(fleet: TestFleet) -> None:
    sent = fleet.app.send_task("plain_tasks.reject_first")

    assert sent.get(timeout=patient(20)) is True
    eventually(lambda: fleet.broker.client.zcard(fleet.app.keys.returned) == 0, what="nothing remembered")
