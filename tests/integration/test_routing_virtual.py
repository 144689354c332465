"""Thousands of random asks through the real admission and Lua, without processes: fit, order, no GPU twice or idle.

The machines are those of tests/support/mixed_fleet.py, on a virtual clock; what fits is decided by its plain matcher.
VIRTUAL_TASKS and VIRTUAL_SEED choose other asks.
"""

from __future__ import annotations

import heapq
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gpuflow.routing.capability import Capability
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.resources import requirement_from_resources
from gpuflow.worker.slots import Limits
from tests.fixtures.simulated_nvml import MODELS, SimGpu
from tests.support.fleet import Broker
from tests.support.mixed_fleet import MACHINES, Ask, Machine, fitting_cards, random_ask, satisfies, wrong_place
from tests.support.virtual_fleet import Clock, Publisher, Taken, VirtualGpus, VirtualWorker
from tests.support.waiting import patient

TASKS = int(os.environ.get("VIRTUAL_TASKS", "500"))
SEED = int(os.environ.get("VIRTUAL_SEED", "11"))
#: Distinct asks among them.
DISTINCT = 300
#: A look every second, and one more for what a worker left to another.
PASSED_OVER_SECONDS = 2.0
CPUS_OF_A_JOB = 1


@dataclass
class Hardware:
    """What a probe would report of a machine."""

    gpus: list[Any]
    cpu_count: int = 8
    memory_total_mib: int = 65536


@dataclass
class Gpu:
    index: int
    uuid: str
    name: str
    total_mib: int
    mig_parent_uuid: str | None
    compute_capability: str | None


def probed(machine: Machine) -> Capability:
    """Return what a worker of the machine would say of it."""
    names = {card.uuid: _nvml_name(machine.simulated[0], card.names[0]) for card in machine.cards}
    gpus = [
        Gpu(index, card.uuid, names[card.uuid], card.mib, "GPU-mig-0" if card.is_slice else None, str(card.compute))
        for index, card in enumerate(machine.cards)
    ]
    return Capability.of(Hardware(gpus=gpus), machine.labels)


def _nvml_name(gpu: SimGpu, short: str) -> str:
    name = MODELS[gpu.model][0]
    return f"{name} MIG {short[3:5]}.{short[5:]}" if short.startswith("mig") else name


@dataclass(kw_only=True)
class Task:
    name: str
    ask: Ask
    requirement: Requirement
    priority: int
    seconds: float
    limit: float | None
    at: float = 0.0
    number: int = 0

    @property
    def order(self) -> tuple[int, int]:
        return -self.priority, self.number


@dataclass
class World:
    """The fleet, what waits, what runs, and what went wrong."""

    clock: Clock
    publisher: Publisher
    workers: dict[str, VirtualWorker]
    machine_of: dict[str, Machine]
    waiting: dict[str, dict[str, Task]] = field(default_factory=dict)
    running: dict[str, tuple[Task, str, tuple[str, ...]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    waited: dict[int, float] = field(default_factory=dict)
    ends: list[tuple[float, int, VirtualWorker, Taken]] = field(default_factory=list)
    since: dict[tuple[str, str], float] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)
    pops: int = 0

    def submit(self, task: Task) -> None:
        queue = task.requirement.queue_name()
        task.at, task.number = self.clock(), next(self.numbers)
        self.waiting.setdefault(queue, {})[task.name] = task
        hints = {"x": "echo", **({"t": task.limit} if task.limit else {})}
        self.publisher.publish(task.name, queue, task.requirement.to_dict(), task.priority, hints)

    def settle(self) -> None:
        """Let every worker that is awake look until it finds nothing and no doorbell rings."""
        workers = list(self.workers.values())
        awake = True
        while awake:
            bells = self.publisher.client.pipeline(transaction=False)
            for worker in workers:
                bells.lpop(worker.leases.bell)
            tokens = bells.execute()
            awake = any(token is not None for token in tokens)
            for worker, token in zip(workers, tokens, strict=True):
                worker.hear(token)
                answer = worker.step()
                self.pops += worker.look.queues != []
                if isinstance(answer, Taken):
                    self.begin(worker, answer)
                awake = awake or bool(answer)

    def begin(self, worker: VirtualWorker, taken: Taken) -> None:
        waits = self.waiting[taken.queue]
        task = waits.pop(taken.task)
        gpus = worker.begin(taken, task.limit)
        machine = self.machine_of[worker.name]
        if problem := wrong_place(task.ask, machine, gpus):
            self.wrong.append(f"{task.name} asks for {dict(task.ask.resources)}: {problem}")
        ahead = min(waits.values(), key=lambda one: one.order, default=task)
        if ahead.order < task.order and task.limit is None:
            self.wrong.append(f"{task.name} was taken before {ahead.name} of the same queue")
        self.running[task.name] = (task, worker.name, gpus)
        self.check_bookings(machine)
        self.waited[task.ask.count] = max(self.waited.get(task.ask.count, 0.0), self.clock() - task.at)
        heapq.heappush(self.ends, (self.clock() + task.seconds, task.number, worker, taken))

    def finish(self, worker: VirtualWorker, taken: Taken) -> None:
        worker.finish(taken)
        del self.running[taken.task]
        self.done[worker.name] += 1

    def promised(self, machine: Machine) -> dict[str, float]:
        """Return how much of each GPU of a machine the running tasks have, in parts of it."""
        parts = dict.fromkeys((card.uuid for card in machine.cards), 0.0)
        cards = {card.uuid: card for card in machine.cards}
        for task, worker, gpus in self.running.values():
            if self.machine_of[worker] is machine:
                for uuid in gpus:
                    mib = task.ask.share_mib(cards[uuid])
                    parts[uuid] += 1.0 if mib is None else mib / cards[uuid].mib
        return parts

    def check_bookings(self, machine: Machine) -> None:
        double = {uuid: part for uuid, part in self.promised(machine).items() if part > 1.0}
        if double:
            self.wrong.append(f"{machine.name} has promised more than there is: {double}")

    def check_idle(self) -> None:
        """Note every task at the head of its queue that a worker could have taken for some time."""
        now, found = self.clock(), {}
        heads = [min(tasks.values(), key=lambda one: one.order) for tasks in self.waiting.values() if tasks]
        for name, worker in self.workers.items():
            machine = self.machine_of[name]
            if worker.gpus.reservation() is not None:
                continue
            parts = self.promised(machine)
            for task in heads:
                if self.could_start(task.ask, machine, parts, busy=worker.admission.jobs() > 0):
                    found[task.name, name] = self.since.get((task.name, name), now)
        self.since = found
        for (task_name, name), at in found.items():
            if now - at > PASSED_OVER_SECONDS:
                self.wrong.append(f"{name} left {task_name} for {now - at:.1f} s")

    def could_start(self, ask: Ask, machine: Machine, parts: dict[str, float], *, busy: bool) -> bool:
        if busy and (not ask.count or "cpu" in ask.resources.get("hardware", {})):
            return False
        if not ask.shares:
            return satisfies(ask, machine, [uuid for uuid, part in parts.items() if not part])
        roomy = [c for c in fitting_cards(ask, machine) if parts[c.uuid] + (ask.share_mib(c) or 0) / c.mib <= 1]
        return satisfies(ask, machine) and bool(roomy)


def random_tasks(choice: random.Random) -> list[Task]:
    kinds = []
    for _ in range(DISTINCT):
        ask = random_ask(choice)
        (requirement,) = requirement_from_resources(ask.resources, gpu_available=True)
        kinds.append((ask, requirement))
    tasks = []
    for number in range(TASKS):
        ask, requirement = choice.choice(kinds)
        seconds = choice.uniform(0.5, 3)
        limit = round(seconds + 0.5, 2) if choice.random() < 0.5 else None
        priority = choice.choice((0, 3, 5, 5, 5, 9))
        tasks.append(
            Task(name=f"t{number}", ask=ask, requirement=requirement, priority=priority, seconds=seconds, limit=limit)
        )
    return tasks


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    broker = Broker(tmp_path / "broker")
    clock = Clock()
    monkeypatch.setattr("gpuflow.worker.reserving.boot_seconds", clock)
    workers, machine_of = {}, {}
    for machine in MACHINES:
        capability = probed(machine)
        gpus = VirtualGpus(capability, clock)
        for name in [machine.name, f"{machine.name}-2"] if machine.name in ("a100", "h100") else [machine.name]:
            limits = replace(Limits(), cpu_jobs=2)
            workers[name] = VirtualWorker(name, broker.client, capability, gpus, clock, limits)
            machine_of[name] = machine
    try:
        yield World(clock, Publisher(broker.client), workers, machine_of)
    finally:
        broker.close()


@pytest.mark.timeout(patient(180))
def test_hundreds_of_random_asks(world: World) -> None:
    choice = random.Random(SEED)
    tasks = random_tasks(choice)
    began_at, next_check = time.monotonic(), world.clock()
    arrivals = iter(tasks)
    task, at = next(arrivals, None), world.clock()

    while task is not None or world.ends or any(world.waiting.values()):
        assert world.clock() < 1e6, f"{sum(map(len, world.waiting.values()))} tasks wait for ever"
        next_end = world.ends[0][0] if world.ends else float("inf")
        rescan = min(worker.look.again_at for worker in world.workers.values())
        world.clock.now = max(world.clock(), min(next_end, at if task else float("inf"), max(rescan, next_check)))
        while task is not None and at <= world.clock():
            world.submit(task)
            task, at = next(arrivals, None), at + choice.expovariate(5)
        while world.ends and world.ends[0][0] <= world.clock():
            world.finish(*heapq.heappop(world.ends)[2:])
        world.settle()
        if world.clock() >= next_check:
            world.check_idle()
            next_check = world.clock() + 0.5

    assert world.wrong == []
    assert sum(world.done.values()) == TASKS
    real, virtual = time.monotonic() - began_at, world.clock() - Clock().now
    print(f"\n{TASKS} tasks, {world.pops} pops, {virtual:.0f} virtual seconds in {real:.1f} s")
    print(f"by worker: {dict(world.done)}")
    print(f"longest wait by GPUs: { {gpus: round(s) for gpus, s in sorted(world.waited.items())} }")
