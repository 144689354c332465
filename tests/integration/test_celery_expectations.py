"""What a Celery user takes for granted of plain tasks, on a real worker."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.app.task import Context
from celery.exceptions import WorkerLostError
from celery.utils import uuid
from kombu import Queue

from gpuflow.client import submit
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One broker for all tests of this file."""
    return long_fleet


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


def test_a_memory_error_is_the_failure_of_its_task_alone(fleet: TestFleet, worker: WorkerProcess) -> None:
    sent = fleet.app.send_task("plain_tasks.out_of_memory")

    with pytest.raises(MemoryError, match="no room"):
        sent.get(timeout=patient(20))

    eventually(lambda: not fleet.broker.client.hlen(fleet.app.keys.unacked), what="its acknowledgement")
    assert "end_not_told" not in worker.log()
    assert fleet.app.send_task("plain_tasks.add", args=(2, 3)).get(timeout=patient(20)) == 5


@pytest.mark.usefixtures("worker")
def test_a_message_that_comes_again_says_so(fleet: TestFleet) -> None:
    sent = fleet.app.send_task("plain_tasks.reject_first")

    assert sent.get(timeout=patient(20)) is True
    eventually(lambda: fleet.broker.client.zcard(fleet.app.keys.returned) == 0, what="nothing remembered")


def test_what_waits_for_its_time_is_seen(fleet: TestFleet, worker: WorkerProcess) -> None:
    later = fleet.app.send_task("plain_tasks.add", args=(1, 2), countdown=600)
    fleet.app.send_task("plain_tasks.add", args=(1, 2), countdown=600, queue="of-others")
    inspect = fleet.app.control.inspect(timeout=patient(20), limit=1)

    ((entry,),) = inspect.scheduled().values()
    ((state, request),) = (found[later.id] for found in inspect.query_task(later.id, "no-such-task").values())

    assert (entry["request"]["id"], entry["request"]["name"]) == (later.id, "plain_tasks.add")
    seconds = (datetime.fromisoformat(entry["eta"]) - datetime.now(UTC)).total_seconds()
    assert 0 < seconds <= 600
    assert (state, request["args"]) == ("scheduled", "(1, 2)")
    assert fleet.app.control.purge() == 1
    assert list(inspect.scheduled().values()) == [[]]


@pytest.mark.usefixtures("worker")
def test_a_task_sees_the_eta_that_it_was_asked_for(fleet: TestFleet) -> None:
    eta = datetime.now(UTC) + timedelta(seconds=0.2)

    assert fleet.app.send_task("plain_tasks.asked_eta", eta=eta).get(timeout=patient(20)) == eta.isoformat()
    assert fleet.app.send_task("plain_tasks.asked_eta").get(timeout=patient(20)) is None


def test_a_consumer_that_is_no_worker_takes_as_many_as_its_prefetch_count(fleet: TestFleet) -> None:
    for _ in range(3):
        fleet.app.send_task("plain_tasks.add", args=(1, 2), queue="elsewhere")
    taken: list[Any] = []
    with fleet.app.connection_for_read() as connection, connection.channel() as channel:
        consumer = channel.Consumer([Queue("elsewhere")], callbacks=[lambda _, message: taken.append(message)])
        consumer.qos(prefetch_count=2)
        with consumer:

            def comes() -> int:
                with contextlib.suppress(TimeoutError):
                    while True:
                        connection.drain_events(timeout=2.5)
                return len(taken)

            assert comes() == 2
            taken[0].ack()
            assert comes() == 3
            for message in taken[1:]:
                message.ack()


def test_a_result_whose_message_was_missed_is_found(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery reads a result and subscribes to its channel over two connections; it may be published in between."""
    result = fleet.app.AsyncResult(uuid())
    key = fleet.app.keys.celery_result(result.id)
    consumer, was_read = fleet.app.backend.result_consumer, threading.Event()
    read = consumer.on_wait_for_pending

    def note_read(*args: Any, **options: Any) -> None:
        read(*args, **options)
        was_read.set()

    monkeypatch.setattr(consumer, "on_wait_for_pending", note_read)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(result.get, timeout=patient(20))
        assert was_read.wait(timeout=patient(30))
        fleet.broker.client.set(key, fleet.app.backend.meta("SUCCESS", "stored", Context(id=result.id)))
        assert waiting.result(timeout=patient(30)) == "stored"


def test_a_late_failure_does_not_replace_the_success_of_another(fleet: TestFleet, worker: WorkerProcess) -> None:
    task = submit(fleet.echo(output=1), app=fleet.app)
    assert task.get(timeout=patient(60))["output"] == 1
    request = Context(id=task.id, task="gpuflow.echo")

    fleet.app.backend.store_result(task.id, ValueError("late"), "FAILURE", request=request)

    assert fleet.app.AsyncResult(task.id).state == "SUCCESS"
