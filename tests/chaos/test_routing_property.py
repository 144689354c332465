"""Six different machines, seven real workers, and random asks: each task where it fits, no GPU twice, nobody idle.

What is checked comes from the children (their own CUDA_VISIBLE_DEVICES and clock), from the registry and from the
queues, as anybody can read them; what fits is decided by the plain matcher of tests/support/mixed_fleet.py.
ROUTING_TASKS and ROUTING_SEED choose other asks.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import Task, submit
from gpuflow.fleet.gpu_locks import GpuLedger
from gpuflow.fleet.gpu_reservation import Reservations
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from tests.fixtures.simulated_nvml import simulated_machine
from tests.support.fleet import TestFleet
from tests.support.mixed_fleet import MACHINES, Ask, Machine, random_ask, satisfies, wrong_place
from tests.support.spans import REPORT, Span, double_bookings, span
from tests.support.waiting import eventually

TASKS = int(os.environ.get("ROUTING_TASKS", "300"))
SEED = int(os.environ.get("ROUTING_SEED", "4"))
#: How long a message may lie although a worker could take it: a look every second, and the registry as late as that.
PASSED_OVER_SECONDS = 3.0
SAMPLE_SECONDS = 0.2


@dataclass(kw_only=True)
class Onlooker:
    """Watches a fleet, and notes every message that lay at the head of its queue while a worker could take it."""

    fleet: TestFleet
    machine_of: Mapping[str, Machine]
    asks: Mapping[str, Ask]
    passed_over: set[str] = field(default_factory=set)
    samples: int = 0
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _ledgers: dict[str, Reservations] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=30)

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        now = time.monotonic()
        waiting = {(task, worker) for task in self._heads() for worker in self._could_take(task)}
        self._since = {pair: self._since.get(pair, now) for pair in waiting}
        self.passed_over |= {
            f"{worker} left {task} ({self.asks[task].resources}) for {now - since:.1f} s"
            for (task, worker), since in self._since.items()
            if now - since > PASSED_OVER_SECONDS
        }
        self.samples += 1

    def _heads(self) -> list[str]:
        """Return the ids of the tasks that are the next of their queues."""
        client = self.fleet.broker.client
        pipe = client.pipeline(transaction=False)
        for queue in client.zrange("gpuflow.ready", 0, -1):
            pipe.lindex(queue, -1)
        return [json.loads(raw)["headers"]["id"] for raw in pipe.execute() if raw]

    def _could_take(self, task: str) -> list[str]:
        """Return the workers whose entries say that they could start the task now."""
        ask = self.asks.get(task)
        return [] if ask is None else [one.id for one in self.fleet.registry.workers() if self._is_idle_for(ask, one)]

    def _is_idle_for(self, ask: Ask, worker: WorkerEntry) -> bool:
        machine = self.machine_of[worker.id]
        if worker.state not in ((WorkerState.IDLE, WorkerState.BUSY) if ask.count else (WorkerState.IDLE,)):
            return False
        if self._reserved(machine) or ("cpu" in ask.resources.get("hardware", {}) and worker.state is WorkerState.BUSY):
            return False
        return satisfies(ask, machine, worker.load["freeGpus"])

    def _reserved(self, machine: Machine) -> bool:
        """Whether the machine is being kept free for a task."""
        if not machine.cards:
            return False
        if machine.name not in self._ledgers:
            self._ledgers[machine.name] = Reservations(GpuLedger(lock_dir(self.fleet, machine)))
        return self._ledgers[machine.name].current() is not None


def lock_dir(fleet: TestFleet, machine: Machine) -> Path:
    return fleet.folder / machine.name / "locks"


def start_fleet(fleet: TestFleet) -> dict[str, Machine]:
    """Start one worker on each machine, and two on the one with four A100; return worker -> machine."""
    machine_of = {machine.name: machine for machine in MACHINES}
    machine_of["a100-2"] = machine_of["a100"]
    for name, machine in machine_of.items():
        folder = fleet.folder / machine.name
        folder.mkdir(exist_ok=True)
        env = {**simulated_machine(folder, machine.simulated), "GPUFLOW_LOCK_DIR": str(lock_dir(fleet, machine))}
        labels = [part for key, value in machine.labels.items() for part in ("--label", f"{key}={value}")]
        fleet.spawn_worker(name, *labels, env=env)
    for worker in fleet.workers:
        worker.ready(within=90)
    return machine_of


def submit_random(fleet: TestFleet, onlooker_asks: dict[str, Ask]) -> list[tuple[Ask, Task]]:
    choice = random.Random(SEED)
    submitted = []
    for _ in range(TASKS):
        ask = random_ask(choice)
        echo = fleet.echo(sleep_seconds=round(choice.uniform(0, 0.3), 2), report_env=list(REPORT))
        task = submit(
            {**echo, "resources": ask.resources, "priority": choice.choice((3, 5, 5, 5, 7)), "timeout": 60},
            app=fleet.app,
        )
        onlooker_asks[task.id] = ask
        submitted.append((ask, task))
    return submitted


def judge(ask: Ask, record: Any, machine: Machine) -> tuple[str, Span]:
    """Return what is wrong with where a task ran, and what its child says of itself."""
    cards = {card.uuid: card for card in machine.cards}
    one = span(record.id, record.result)
    problem = wrong_place(ask, machine, one.gpus)
    wrong = f"{record.id} asks for {dict(ask.resources)}: {problem}" if problem else ""
    mib = ask.share_mib(cards[one.gpus[0]]) if ask.shares and not wrong else None
    return wrong, span(record.id, record.result, mib)


@pytest.mark.timeout(300)
def test_random_asks_on_six_machines(fleet: TestFleet) -> None:
    machine_of = start_fleet(fleet)
    asks: dict[str, Ask] = {}
    onlooker = Onlooker(fleet=fleet, machine_of=machine_of, asks=asks)
    began_at = time.monotonic()

    submitted = submit_random(fleet, asks)
    records = [task.wait(timeout=240) for _, task in submitted]
    seconds = time.monotonic() - began_at
    onlooker.close()

    assert {record.state for record in records} == {"SUCCEEDED"}, [r.error for r in records if r.error]
    judged = [
        judge(ask, record, machine_of[str(record.worker)]) for (ask, _), record in zip(submitted, records, strict=True)
    ]
    assert [wrong for wrong, _ in judged if wrong] == []
    capacity = {card.uuid: card.mib for machine in MACHINES for card in machine.cards}
    assert double_bookings([one for _, one in judged], capacity) == []
    assert onlooker.passed_over == set()
    assert all(record.attempt == 1 for record in records)
    eventually(lambda: fleet.broker.client.zcard("gpuflow.ready") == 0, what="an empty ready index")
    used = {name: sum(1 for record in records if record.worker == name) for name in machine_of}
    print(f"\n{TASKS} tasks of {len({r.queue for r in records})} queues in {seconds:.1f} s; tasks by worker: {used}")
    print(f"samples: {onlooker.samples}")
