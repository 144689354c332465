"""An operator's night: one fault after another, and after each every view says what is true, or soon does."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from gpuflow.explaining import explain_queues
from tests.chaos.night import Night
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually

#: Heartbeats and leases that let a night pass quickly.
QUICK = {"HEARTBEAT_INTERVAL_SEC": "1", "HEARTBEAT_TIMEOUT_SEC": "12", "GPUFLOW_LEASE_SEC": "4"}
SKEWED = Path(__file__).parents[1] / "support" / "skewed"
#: So many faults, drawn by this seed, instead of each once.
ROUNDS = int(os.environ.get("NIGHT_ROUNDS", "0"))
SEED = int(os.environ.get("NIGHT_SEED", "23"))


def a_frozen_worker(night: Night) -> None:
    task = night.hold()
    name = night.worker_of(task)
    night.workers[name].send(signal.SIGSTOP)
    night.stands[name] = frozenset({"silent"})
    night.settled("a worker that is frozen")
    night.workers[name].send(signal.SIGCONT)
    night.stands[name] = frozenset()
    night.settled("a worker that goes on")


def a_killed_worker(night: Night) -> None:
    task = night.hold()
    name = night.worker_of(task)
    night.workers[name].send(signal.SIGKILL)
    night.workers[name].process.wait()
    night.stands[name] = frozenset({"silent"})
    night.settled("a worker that was killed")
    night.stands[name] = frozenset({"offline"})
    night.settled("the end of its heartbeat")
    night.start(name, **QUICK)
    night.settled("its return")


def a_worker_killed_and_started_again(night: Night) -> None:
    task = night.hold()
    name = night.worker_of(task)
    night.workers[name].send(signal.SIGKILL)
    night.workers[name].process.wait()
    night.start(name, **QUICK)
    night.settled("a worker that was killed and started again at once")


def nobody_is_left(night: Night) -> None:
    task = night.hold()
    night.worker_of(task)
    for name, worker in night.workers.items():
        worker.send(signal.SIGSTOP)
        night.stands[name] = frozenset({"silent"})
    for id, state in night.states.items():
        night.states[id] = "QUEUED" if state == "RUNNING" else state
    night.settled("the freeze of all")
    assert task.cancel() == "cancelled"
    night.states[task.id] = "CANCELLED"
    night.settled("a cancel without a worker")
    for name, worker in night.workers.items():
        worker.send(signal.SIGCONT)
        night.stands[name] = frozenset()
    for id, state in night.states.items():
        night.states[id] = "RUNNING" if state == "QUEUED" else state
    night.settled("the return of all")


def a_disabled_worker(night: Night) -> None:
    name = next(iter(night.workers))
    night.order("disable", name)
    night.stands[name] = frozenset({"disabled"})
    night.settled("a disabled worker")
    night.order("enable", name)
    night.stands[name] = frozenset()
    night.settled("an enabled worker")


def a_drained_worker(night: Night) -> None:
    task = night.hold()
    name = night.worker_of(task)
    night.order("drain", name)
    night.stands[name] = frozenset({"draining"})
    night.settled("a drain")
    for one in [one for one in night.running() if one.record().worker == name]:
        night.end(one)
    night.stands[name] = frozenset({"offline"})
    night.settled("the end of a drain")
    night.start(name, **QUICK)
    night.settled("the return of a drained worker")


def a_full_disk(night: Night) -> None:
    night.start("w9", **QUICK, GPUFLOW_DISK_FLOOR_BYTES=str(1 << 60))
    night.stands["w9"] = frozenset({"disk-full"})
    night.settled("a worker with a full disk")
    night.stop("w9")


def a_wrong_clock(night: Night) -> None:
    path = os.pathsep.join([str(SKEWED), str(SKEWED.parent)])
    night.start("w8", **QUICK, CLOCK_AHEAD_SECONDS="90", PYTHONPATH=path)
    night.stands["w8"] = frozenset({"clock-skewed"})
    night.settled("a worker whose clock is wrong")
    night.stop("w8")


def an_unreadable_entry(night: Night) -> None:
    client, keys = night.fleet.broker.client, night.fleet.app.keys
    client.hset(keys.worker("odd"), mapping={"id": "odd", "state": "FLYING", "capability": "[", "load": "7"})
    client.sadd(keys.workers, "odd")
    client.set(keys.heartbeat("odd"), 1, px=600_000)
    night.settled("an entry that nobody can read")
    assert "odd" in night.warning("unreadable workers")
    night.fleet.registry.forget("odd")


def a_broker_that_dies(night: Night) -> None:
    night.fleet.broker.kill()
    night.fleet.broker.restart()
    night.settled("a restart of the broker")


def a_killed_shim(night: Night) -> None:
    task = night.hold()
    name = night.worker_of(task)

    def shims() -> list[psutil.Process]:
        children = [child for child in night.workers[name].supervised() if child.environ().get("TASK_ID") == task.id]
        return [parent for child in children if (parent := child.parent()) is not None]

    for shim in eventually(shims, what="the shim"):
        shim.kill()
    eventually(lambda: task.record().attempt == 2, within=60, what="the next attempt")
    night.settled("the death of a shim")


def a_task_that_dies(night: Night) -> None:
    spec = {**night.fleet.echo(fail={"message": "boom", "retryable": True}), "retry": {"max_attempts": 1}}
    night.submit(spec, "DEAD")
    night.settled("a dead letter")


def a_task_for_nobody(night: Night) -> None:
    hardware = {"gpu": {"type": "h100", "count": 8}}
    task = night.submit({**night.fleet.echo(output=1), "resources": {"hardware": hardware}}, "QUEUED")
    night.settled("a task that nobody can run")
    queue = task.record().queue
    rows = [row for row in [*night.said("queues"), *explain_queues(night.fleet.app)] if row["name"] == queue]
    assert [(row["waiting"], row["running"], row["workers"]) for row in rows] == [(1, 0, [])] * 2
    assert queue in night.warning("queues")
    (told,) = night.said("explain", task.id)
    assert told["outcome"] == "cannot"
    assert task.cancel() == "cancelled"
    night.states[task.id] = "CANCELLED"
    night.settled("its cancel")


def a_message_that_nobody_can_read(night: Night) -> None:
    night.fleet.broker.client.lpush("cpu", "no message at all")
    client, keys = night.fleet.broker.client, night.fleet.app.keys
    before = client.llen(keys.unreadable)
    night.end(night.hold())  # whoever takes it meets the other first
    night.settled("a message that nobody can read")
    assert client.llen(keys.unreadable) == before + 1
    assert f"{before + 1} of" in night.warning("unreadable messages")


def work_that_ends(night: Night) -> None:
    for task in night.running():
        night.end(task)
    night.settled("the end of all work")


FAULTS: tuple[Callable[[Night], None], ...] = (
    a_frozen_worker,
    a_killed_worker,
    a_worker_killed_and_started_again,
    work_that_ends,
    nobody_is_left,
    a_disabled_worker,
    a_drained_worker,
    a_full_disk,
    a_wrong_clock,
    an_unreadable_entry,
    a_task_that_dies,
    a_task_for_nobody,
    a_message_that_nobody_can_read,
    a_broker_that_dies,
    a_killed_shim,
    work_that_ends,
)


def test_after_each_fault_every_view_tells_the_truth(fleet: TestFleet) -> None:
    night = Night(fleet)
    for name in ("w1", "w2", "w3"):
        night.start(name, **QUICK)
    night.end(night.hold())  # the first task makes the queue
    night.settled("the start")
    chance = random.Random(SEED)
    for number, fault in enumerate(chance.choices(FAULTS, k=ROUNDS) if ROUNDS else FAULTS, 1):
        print(f"night of seed {SEED}, {number}: {fault.__name__}", flush=True)
        fault(night)
    work_that_ends(night)
    print(f"{night.looks} looks at {len(night.tasks)} tasks, no contradiction", flush=True)
