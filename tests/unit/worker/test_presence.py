"""When a worker writes its entry: a few fields before each attempt, the whole of it once a second at most."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gpuflow.broker.keys import Keys
from gpuflow.fleet.hardware_host import Host
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.routing.capability import Capability
from gpuflow.routing.placement import HostUsage
from gpuflow.settings import Settings
from gpuflow.worker import presence
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.presence import PresenceThread
from gpuflow.worker.task_limits import TaskLimits


class Server:
    """Keeps the hash of the worker; `writes` counts the whole entries and the parts that were written."""

    def __init__(self) -> None:
        self.hash: dict[str, str] = {}
        self.writes = {"whole": 0, "part": 0}
        self.away = False
        self.before_part: Callable[[], None] = lambda: None

    def hset(self, _: str, field: str = "", value: str = "", mapping: dict[str, str] | None = None) -> None:
        if mapping is None:
            self.before_part()
        if self.away:
            raise RedisConnectionError("away")
        self.writes["part" if mapping is None else "whole"] += 1
        self.hash |= {field: value} if mapping is None else mapping

    def pipeline(self) -> Server:
        return self

    def sadd(self, *_: Any) -> None: ...
    def set(self, *_: Any, **__: Any) -> None: ...
    def execute(self) -> None: ...

    def read(self) -> WorkerEntry:
        return WorkerEntry.from_hash(self.hash, left_ms=120_000)


class Worker:
    """A worker for two jobs, without GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.now, self.held = Server(), 1000.0, 0
        self._looks = itertools.count()
        monkeypatch.setattr(presence.time, "monotonic", self._clock)
        admission = SimpleNamespace(
            jobs=lambda: self.held,
            free_jobs=lambda: 2 - self.held,
            usage=HostUsage,
            sessions=None,
            draining=False,
            enabled=True,
            idle=lambda: not self.held,
            limits=SimpleNamespace(max_jobs=2),
            capability=Capability(),
            matcher=SimpleNamespace(name="class", families=None, names=list, cost=0.0),
            models=SimpleNamespace(names=tuple),
        )
        self.runtime = SimpleNamespace(
            app=SimpleNamespace(redis=self.server, keys=Keys(), settings=Settings(), signer=None),
            admission=admission,
            machine_gpus=MachineGpus(()),
            hardware=SimpleNamespace(hostname="box", gpus=(), driver_problem="", problems=()),
            supported_runtimes=SimpleNamespace(to_dict=dict, secrets=()),
            worker_id="w",
            ephemeral=False,
            asked_queues=None,
            executors=None,
            user_types=(),
            running={},
            connected=True,
            limits=TaskLimits(),
        )
        self.presence = PresenceThread(cast("Any", self.runtime), "w@box")
        self.presence.write()

    def _clock(self) -> float:
        """Each look at the clock is a little later than the one before."""
        return self.now + next(self._looks) * 1e-6

    def turn(self) -> bool:
        """Take a turn of the thread; say whether the whole entry was written."""
        due = self.presence._is_due(self._clock())
        if due:
            self.presence.write()
        return due

    def take(self) -> None:
        self.held += 1
        self.presence.note_held()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_what_is_held_is_told_before_the_attempt_begins(worker: Worker) -> None:
    assert (worker.server.read().state, worker.server.read().load["freeJobs"]) == (WorkerState.IDLE, 2)

    worker.take()

    entry = worker.server.read()
    assert (entry.state, entry.load["jobs"], entry.load["freeJobs"]) == (WorkerState.BUSY, 1, 1)
    assert entry.load["diskFreeMib"] > 0, "the rest of the load is that of the last heartbeat"
    worker.take()
    assert worker.server.read().load["freeJobs"] == 0
    assert worker.server.writes == {"whole": 1, "part": 2}


def test_the_next_entry_takes_the_place_of_what_was_noted_since(worker: Worker) -> None:
    worker.take()
    worker.held = 0
    worker.now += presence.REST_SECONDS

    assert worker.turn(), "it began and ended between two turns, which saw nothing of it"

    assert (worker.server.read().state, worker.server.read().load["freeJobs"]) == (WorkerState.IDLE, 2)
    assert worker.server.hash["newer_load"] == ""
    worker.now += presence.REST_SECONDS
    assert not worker.turn(), "nothing has changed since"


def test_a_thousand_short_tasks_a_minute_cost_no_entry_each(worker: Worker) -> None:
    for _ in range(1000):
        worker.take()
        assert worker.server.read().load["jobs"] == 1
        worker.now += 0.03
        worker.turn()
        worker.held = 0
        worker.now += 0.03
        worker.turn()

    assert worker.server.writes["part"] <= 62, "what the server knows is not told again"
    assert worker.server.writes["whole"] <= 62
    assert len(worker.server.hash["newer_load"]) < 200


def test_those_that_wait_for_one_that_writes_share_the_next_write(worker: Worker) -> None:
    waiting = threading.Semaphore(0)
    began, go_on = threading.Event(), threading.Event()

    def before_part() -> None:
        worker.server.before_part = lambda: None
        began.set()
        go_on.wait(30)

    worker.server.before_part = before_part
    note = worker.presence.note_held

    def take() -> None:
        worker.held += 1
        note()

    first = threading.Thread(target=take)
    first.start()
    assert began.wait(30)
    lock = worker.presence._writing

    class Counted:
        def acquire(self, timeout: float) -> bool:
            waiting.release()
            return lock.acquire()

        def release(self) -> None:
            lock.release()

    worker.presence._writing = cast("Any", Counted())
    others = [threading.Thread(target=take) for _ in range(5)]
    for one in others:
        one.start()
    for _ in others:
        assert waiting.acquire(timeout=30)
    go_on.set()
    for one in (first, *others):
        one.join(30)

    assert worker.server.writes["part"] == 2
    assert worker.server.read().load["jobs"] == 6


def test_a_broker_that_is_away_stops_no_attempt_and_is_told_with_the_next_entry(worker: Worker) -> None:
    worker.server.away = True
    worker.take()
    worker.server.away = False
    worker.now += presence.REST_SECONDS

    assert worker.turn()

    assert worker.server.read().load["jobs"] == 1


def test_what_the_server_may_not_know_is_told_again(worker: Worker) -> None:
    worker.take()
    worker.held, worker.server.away = 0, True
    worker.presence.note_held()  # nobody knows whether it was stored
    worker.held, worker.server.away = 1, False

    worker.presence.note_held()

    assert worker.server.writes["part"] == 2


def test_an_attempt_does_not_wait_for_a_write_that_hangs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "NOTE_WAIT_SECONDS", 0.01)
    with worker.presence._writing:
        worker.take()
    worker.now += presence.REST_SECONDS
    worker.runtime.running["a"] = "echo"

    assert worker.turn(), "what runs has changed"

    assert worker.server.writes == {"whole": 2, "part": 0}
    assert worker.server.read().load["jobs"] == 1


def test_an_attempt_does_not_fail_by_what_cannot_be_noted(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(worker.runtime.admission, "free_jobs", fail)

    worker.take()

    assert not worker.presence._writing.locked()


@pytest.mark.parametrize("note", ["no JSON", "null", "[1]", "{}", '{"startedAt": 1}', '{"startedAt": {}, "load": 1}'])
def test_a_note_that_is_none_of_this_process_counts_for_nothing(worker: Worker, note: str) -> None:
    worker.take()
    noted = worker.server.hash["newer_load"]
    assert worker.server.read().load["freeJobs"] == 1

    for started_at in ("1.5", worker.server.hash["started_at"]):
        for text in (note, noted.replace('"load": {', '"load": 7, "was": {')):
            kept = {**worker.server.hash, "started_at": started_at, "newer_load": text}
            entry = WorkerEntry.from_hash(kept, left_ms=120_000)
            assert (entry.state, entry.load["freeJobs"]) == (WorkerState.IDLE, 2)
    other = {**worker.server.hash, "started_at": "1.5"}
    assert WorkerEntry.from_hash(other, left_ms=120_000).load["freeJobs"] == 2


def test_a_disk_that_passes_its_floor_is_told_each_way(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = SimpleNamespace(error=lambda event, **_: said.append(event), info=lambda event, **_: said.append(event))
    monkeypatch.setattr(presence, "log", log)
    admission = worker.runtime.admission
    free = 100
    monkeypatch.setattr(presence, "free_mib", lambda _: free)

    admission.capability = Capability(disk_free_mib=10, disk_floor_mib=50)
    assert worker.presence._disk_has_passed_the_floor()
    admission.capability = Capability(disk_free_mib=free, disk_floor_mib=50)
    assert not worker.presence._disk_has_passed_the_floor()
    free = 10
    assert worker.presence._disk_has_passed_the_floor()
    assert said == ["disk_above_the_floor", "disk_below_the_floor"]


def test_what_memory_is_left_is_that_of_its_group(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(cpu_count=1, memory_total_mib=600, memory_available_mib=123)
    monkeypatch.setattr(presence, "read_host", lambda: host)
    worker.presence.write()
    assert worker.server.read().load["memoryAvailableMib"] == 123
