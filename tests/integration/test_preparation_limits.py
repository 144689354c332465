"""Fetching what a task reads is part of its attempt: a server that never answers holds neither a cancel nor a drain."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from gpuflow.client import Task, submit
from gpuflow.errors import TaskFailed
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

#: Below the time that a reader waits for a server by itself.
LEASE = {"GPUFLOW_LEASE_SEC": "3"}


class Tarpit:
    """An HTTP server on loopback that takes every connection and says nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/adapter.tar.gz"
        self.taken: list[socket.socket] = []
        self._taker = threading.Thread(target=self._take, daemon=True)
        self._taker.start()

    def _take(self) -> None:
        while True:
            try:
                self.taken.append(self._listener.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not end an accept
        self._listener.close()
        self._taker.join(timeout=patient(10))
        for one in self.taken:
            one.close()


@pytest.fixture
def tarpit() -> Iterator[Tarpit]:
    made = Tarpit()
    yield made
    made.close()


def submitted(fleet: TestFleet, tarpit: Tarpit, **more: object) -> Task:
    """Submit a task whose input never comes."""
    spec = {"taskType": "echo", "echo": {"output": 1}, "checkpoint": {"load": {"url": tarpit.url}}, **more}
    return submit(spec, app=fleet.app)


def held_up(fleet: TestFleet, tarpit: Tarpit, **more: object) -> Task:
    """Submit a task whose input never comes, and wait until it is asked for."""
    before = len(tarpit.taken)
    task = submitted(fleet, tarpit, **more)
    eventually(lambda: len(tarpit.taken) > before, what="the input asked for")
    return task


def test_a_cancel_ends_it(fleet: TestFleet, tarpit: Tarpit) -> None:
    fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    task = held_up(fleet, tarpit)

    task.cancel()

    eventually(lambda: task.state == "CANCELLED", what="the cancel")
    assert submit(fleet.echo(output=2), app=fleet.app).get(timeout=patient(30))["output"] == 2


def test_its_time_limit_ends_it(fleet: TestFleet, tarpit: Tarpit) -> None:
    fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    task = submitted(fleet, tarpit, timeout="1s")

    with pytest.raises(TaskFailed, match="the limit is 1 s"):
        task.get(timeout=patient(30))


def test_a_limit_of_the_worker_ends_it_as_a_failure_that_may_pass(fleet: TestFleet, tarpit: Tarpit) -> None:
    fleet.start_worker("w1", "--max-jobs", "1", env=LEASE | {"GPUFLOW_PREPARE_SEC": "1"})
    task = submitted(fleet, tarpit, retry={"max_attempts": 1})

    with pytest.raises(TaskFailed, match="GPUFLOW_PREPARE_SEC"):
        task.get(timeout=patient(30))
    assert task.record().error["retryable"]


def test_a_stop_of_the_worker_gives_it_back(fleet: TestFleet, tarpit: Tarpit) -> None:
    worker = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE | {"GPUFLOW_NOTICE_SEC": "1"})
    task = held_up(fleet, tarpit)

    worker.send(signal.SIGQUIT)

    worker.process.wait(timeout=patient(30))
    record = task.record()
    assert (str(record.state), record.failures, record.preemptions) == ("QUEUED", 0, 1)


def test_it_keeps_its_lease_however_long_it_takes(fleet: TestFleet, tarpit: Tarpit) -> None:
    worker = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    task = held_up(fleet, tarpit)
    client, keys = fleet.broker.client, fleet.app.keys
    tag = client.hget(keys.task(task.id), "tag")
    first = client.zscore(keys.leases, tag)

    eventually(lambda: client.zscore(keys.leases, tag) > first + 6, what="two terms of renewals")

    assert task.state == "STARTING"
    task.cancel()
    eventually(lambda: task.state == "CANCELLED", what="the cancel")
    assert worker.process.poll() is None
