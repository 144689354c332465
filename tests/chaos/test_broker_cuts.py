"""The line between a worker and the broker is cut: once and often, for a moment and for longer than a lease."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflow.broker.scripts import broker_script
from gpuflow.client import submit
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check, check_ran_once, leftovers
from tests.chaos.conftest import LEASE, LEASE_SECONDS
from tests.chaos.proxy import Proxy
from tests.support.fleet import TestFleet, WorkerProcess, running
from tests.support.pops import POP_ONE
from tests.support.waiting import BrokenPromise, eventually

#: Workers that connect again and again within leases of a few seconds: nothing else should load the machine.
pytestmark = pytest.mark.alone

CUTS = 30
SECONDS_OF_CUTS = int(os.environ.get("SECONDS_OF_CUTS", "12"))
#: A worker that is started with `--max-jobs 2` may hold so many jobs.
JOBS = 2


@pytest.fixture
def proxy(fleet: TestFleet) -> Iterator[Proxy]:
    with Proxy(fleet.broker.url) as made:
        yield made


def _behind(
    fleet: TestFleet, proxy: Proxy, name: str, *options: str, lease_seconds: int = LEASE_SECONDS
) -> WorkerProcess:
    """Start a worker that reaches the broker through the proxy alone."""
    env = {"GPUFLOW_LEASE_SEC": str(lease_seconds), "REDIS_URL": proxy.url}
    return fleet.start_worker(name, *options, env=env)


def _held_by(fleet: TestFleet, name: str) -> int:
    """Return how many jobs a worker holds, by the broker's books, that it has not begun."""
    client, keys = fleet.broker.client, fleet.app.keys
    tags = [
        tag
        for tag, owner in client.hgetall(keys.owners).items()
        if owner.startswith(f"{name}:") and owner.endswith("\ncpu")
    ]
    messages = [raw for raw in (client.hmget(keys.unacked, tags) if tags else []) if raw]
    records = fleet.app.ledger.find_many([json.loads(raw)["headers"]["id"] for raw in messages])
    return sum(1 for record in records if record is not None and record.state is TaskState.QUEUED)


class _Watch:
    """Looks all the time how many jobs a worker holds without having begun, and remembers the most."""

    def __init__(self, fleet: TestFleet, name: str) -> None:
        self.most = 0
        self._look = lambda: _held_by(fleet, name)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, self._look())

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_thirty_cuts_of_a_busy_worker_neither_repeat_nor_hoard(fleet: TestFleet, proxy: Proxy, tmp_path: Path) -> None:
    worker = _behind(fleet, proxy, "w1", "--max-jobs", str(JOBS))
    gate = tmp_path / "gate"
    tasks = [submit(fleet.echo(output=n, sleep_seconds=0.5, steps=5), app=fleet.app) for n in range(20)]
    # However long the cuts take, the worker runs something, and more waits for it than it may hold.
    tasks += [submit(fleet.echo(output=n, until_exists=str(gate)), app=fleet.app) for n in range(20)]
    with _Watch(fleet, "w1") as watch:
        for _ in range(CUTS):
            # Each cut hits a worker that is connected again and works.
            made = proxy.connections
            eventually(lambda: proxy.cut() > 0, what="a connection to cut")
            eventually(lambda made=made: proxy.connections > made, what="the worker back")
        gate.touch()
        records = check(fleet, [task.id for task in tasks], within=90)
    check_ran_once(records)
    assert watch.most <= JOBS, f"{watch.most} messages held"
    assert worker.process.poll() is None


def test_what_was_popped_in_an_answer_that_never_came_is_given_back(
    fleet: TestFleet, proxy: Proxy, tmp_path: Path
) -> None:
    # Given a busy worker, and a message that the broker has leased to it without its knowledge, for an hour
    _behind(fleet, proxy, "w1", "--max-jobs", "1")
    gate = tmp_path / "gate"
    busy = submit(fleet.echo(until_exists=str(gate)), app=fleet.app)
    eventually(lambda: busy.state == "RUNNING")
    waiting = submit(fleet.echo(output=1), app=fleet.app)
    keys, client = fleet.app.keys, fleet.broker.client
    owner = client.hget(keys.task(busy.id), "owner_token")
    names = [keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep, keys.bell(owner), "cpu"]
    assert broker_script("pop")(client, names, [owner, 3600, POP_ONE])[0] == "cpu"
    assert client.llen("cpu") == 0

    proxy.cut()

    eventually(lambda: client.llen("cpu") == 1, what="the message back in its list")
    gate.touch()
    check_ran_once(check(fleet, [busy.id, waiting.id]))


def test_a_task_that_ends_on_a_dead_line_leaves_nothing_once_it_is_mended(
    fleet: TestFleet, proxy: Proxy, tmp_path: Path
) -> None:
    # Given a plain task on a worker whose line is dead, for less than a lease
    worker = _behind(fleet, proxy, "w1", "--include", "plain_tasks", lease_seconds=4 * LEASE_SECONDS)
    fleet.app.send_task("plain_tasks.wait_for", args=(str(tmp_path / "go"),))
    eventually(lambda: fleet.broker.client.hlen(fleet.app.keys.unacked) == 1, what="it is taken")
    proxy.refuse()

    # When it ends, and then the line is mended
    (tmp_path / "go").touch()
    eventually(lambda: "event=broker_lost" in worker.log(), what="a worker that knows of its dead line")
    proxy.allow()

    # Then nothing of it is left, although the worker lives on
    eventually(lambda: not leftovers(fleet), what="an empty broker")
    assert worker.process.poll() is None
    assert not worker.log().count("lease_lost") + worker.log().count("leases_lost")


def test_cuts_every_second_under_load_lose_and_repeat_nothing(fleet: TestFleet, proxy: Proxy, tmp_path: Path) -> None:
    workers = [_behind(fleet, proxy, name, "--max-jobs", "1") for name in ("w1", "w2")]
    gate = tmp_path / "gate"
    echo = fleet.echo(output="long", sleep_seconds=SECONDS_OF_CUTS, steps=60, until_exists=str(gate))
    long = submit(echo, app=fleet.app)
    eventually(lambda: long.state == "RUNNING")
    tasks = [submit(fleet.echo(output=n, sleep_seconds=0.2), app=fleet.app) for n in range(20)]

    pace = threading.Event()
    for _ in range(SECONDS_OF_CUTS):
        eventually(lambda: proxy.cut() > 0, what="a connection to cut")
        pace.wait(1)
    gate.touch()

    records = check(fleet, [long.id, *(task.id for task in tasks)], within=60)
    check_ran_once(records)
    assert all(worker.process.poll() is None for worker in workers)


def test_a_task_of_five_leases_runs_once(fleet: TestFleet) -> None:
    for name in ("w1", "w2"):
        fleet.start_worker(name, "--max-jobs", "1", env=LEASE)
    task = submit(fleet.echo(sleep_seconds=5 * LEASE_SECONDS), app=fleet.app)

    (record,) = check(fleet, [task.id])

    assert (record.attempt, record.losses) == (1, 0)
    assert record.finished_at is not None and record.started_at is not None
    assert record.finished_at - record.started_at >= 5 * LEASE_SECONDS


@pytest.mark.parametrize("how", ["refuse", "stall"])
def test_a_worker_cut_off_for_longer_than_its_lease_stops_before_another_starts(
    fleet: TestFleet, proxy: Proxy, tmp_path: Path, how: str
) -> None:
    # Given a task that runs on a worker behind the proxy
    cut_off = _behind(fleet, proxy, "w1", "--max-jobs", "1")
    gate = tmp_path / "gate"
    task = submit(fleet.echo(until_exists=str(gate), ignore_sigterm=True), app=fleet.app)
    eventually(lambda: task.state == "RUNNING")
    (child,) = eventually(cut_off.supervised, what="the child")
    tree = [child.pid]
    other = fleet.start_worker("w2", "--max-jobs", "1", env=LEASE)

    # When its line is dead for good
    getattr(proxy, how)()

    # Then nothing of it runs any more at the moment when the other begins, and it has lost
    overlap: list[int] = []
    eventually(lambda: _seen(fleet, task.id, tree, overlap), what="the second attempt")
    if overlap:
        raise BrokenPromise("the first child ran beside the second attempt")
    proxy.allow()
    gate.touch()
    (record,) = check(fleet, [task.id])
    assert (record.attempt, record.worker, record.losses) == (2, "w2", 1)
    assert [entry.outcome for entry in fleet.app.ledger.attempts(task.id)] == ["lost", "succeeded"]
    eventually(lambda: "leases_lost" in cut_off.log(), what="the loss in the log of w1")
    assert cut_off.process.poll() is None and other.process.poll() is None

    # And it takes up work again
    gate.unlink()
    again = [submit(fleet.echo(until_exists=str(gate)), app=fleet.app) for _ in range(2)]
    eventually(lambda: all(one.state == "RUNNING" for one in again), what="a task on each worker")
    gate.touch()
    assert {record.worker for record in check(fleet, [one.id for one in again])} == {"w1", "w2"}


def _seen(fleet: TestFleet, task_id: str, tree: list[int], overlap: list[int]) -> bool:
    record = fleet.app.ledger.get(task_id)
    if record.attempt < 2:
        return False
    overlap += running(tree)
    return True
