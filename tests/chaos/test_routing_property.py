"""Six different machines, seven real workers, and random asks: each task where it fits, no GPU twice, oldest first.

What is checked comes from the children (their own CUDA_VISIBLE_DEVICES and clock) and from the broker's own order of
events (broker_log.py), never from how long something took; what fits is decided by the plain matcher of
tests/support/mixed_fleet.py. ROUTING_TASKS, ROUTING_WAITING and ROUTING_SEED choose other asks.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import Task, submit
from gpuflow.worker.reserving import TERM_SECONDS
from tests.chaos.broker_log import BrokerLog, Event
from tests.fixtures.simulated_nvml import simulated_machine
from tests.support.fleet import TestFleet
from tests.support.mixed_fleet import MACHINES, Ask, Machine, random_ask, satisfies, wrong_place
from tests.support.spans import REPORT, Span, double_bookings, span
from tests.support.waiting import BrokenPromise, eventually, patient

pytestmark = pytest.mark.alone

TASKS = int(os.environ.get("ROUTING_TASKS", "300"))
#: So many tasks wait before the first may end; their queues are fewer than the 100 that a worker sees at once.
WAITING = int(os.environ.get("ROUTING_WAITING", "150"))
SEED = int(os.environ.get("ROUTING_SEED", "4"))
#: How often a worker that nobody wakes may look (once a second) and leave a task that it could take: a look may go by
#: what was read before, and find GPUs in the hand of the other worker of its machine, which gives them back.
MOST_LOOKS_IN_VAIN = 3
#: The same where machines are kept free for large tasks: a reservation that nobody renews ends by itself.
MOST_LOOKS_IN_VAIN_RESERVED = MOST_LOOKS_IN_VAIN + int(TERM_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One task that has run: what it asked for, and which GPUs its child had on which worker's machine."""

    task: str
    ask: Ask
    priority: int
    worker: str
    machine: Machine
    gpus: frozenset[str]

    @property
    def cpus(self) -> float:
        return float(self.ask.resources.get("hardware", {}).get("cpu", 0))

    def could_be(self, other: Ran) -> bool:
        """Whether what another task got would have done for this one."""
        enough = self.cpus <= other.cpus and satisfies(self.ask, other.machine, other.gpus)
        return enough and self.priority >= other.priority


def passed_over(ran: Sequence[Ran], events: Sequence[Event]) -> dict[str, list[str]]:
    """Return for each task the younger and not more urgent ones that got before it what would have done for it.

    `ran` is in the order of submission. A task that went back to its queue counts for the first time that it was taken
    where it was passed over, and for the last where it passed over others.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, event in enumerate(events):
        if event.kind == "take":
            first.setdefault(event.task, number)
            last[event.task] = number
    found: dict[str, list[str]] = {}
    for place, younger in enumerate(ran):
        if younger.ask.shares:
            continue  # what is left of a GPU beside others does for nobody in particular
        for older in ran[:place]:
            if first[older.task] > last[younger.task] and older.could_be(younger):
                found.setdefault(older.task, []).append(f"{dict(younger.ask.resources)} on {younger.worker}")
    return found


def looks_in_vain(
    ran: Sequence[Ran], events: Sequence[Event], machine_of: Mapping[str, Machine], *, whole: bool
) -> Counter[tuple[str, str]]:
    """Return how often in a row each worker looked unwoken and left a task for which its machine had GPUs free.

    A GPU is free from the end of one task's message to the take of the next. With `whole`, a machine counts as long as
    nothing runs on it: then it is kept free for no task that could not start. Tasks that ask for CPUs are left out.
    """
    of = {one.task: one for one in ran}
    waiting = {one.task for one in ran if not one.cpus and one.ask.count}
    held: dict[str, set[str]] = {machine.name: set() for machine in MACHINES}
    now: Counter[tuple[str, str]] = Counter()
    most: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.kind == "look":
            machine = machine_of[event.worker]
            free = {card.uuid for card in machine.cards}.difference(*(of[task].gpus for task in held[machine.name]))
            for task in waiting:
                pair = (event.worker, task)
                if satisfies(of[task].ask, machine, free) and not (whole and held[machine.name]):
                    now[pair] += 1
                    most[pair] = max(most[pair], now[pair])
                else:
                    now.pop(pair, None)
        elif event.task in of:
            if event.kind == "take":
                waiting.discard(event.task)
                name = machine_of[event.worker].name
                held[name].add(event.task)
                now = Counter({pair: times for pair, times in now.items() if machine_of[pair[0]].name != name})
            else:
                for tasks in held.values():
                    tasks.discard(event.task)
    return most


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


def submit_one(fleet: TestFleet, ask: Ask, priority: int, **echo: Any) -> Task:
    """Submit a task without a time limit that a slow machine could reach."""
    spec = {**fleet.echo(report_env=list(REPORT), **echo), "resources": ask.resources, "priority": priority}
    return submit({**spec, "timeout": 3600}, app=fleet.app)


def random_asks(count: int, *, suits: Callable[[Ask], bool] = lambda ask: True) -> list[tuple[Ask, int]]:
    """Return random asks, each with a priority."""
    choice = random.Random(SEED)
    found: list[tuple[Ask, int]] = []
    while len(found) < count:
        ask, priority = random_ask(choice), choice.choice((3, 5, 5, 5, 7))
        if suits(ask):
            found.append((ask, priority))
    return found


def all_ran(
    asked: Sequence[tuple[Ask, int]], tasks: Sequence[Task], machine_of: Mapping[str, Machine]
) -> tuple[list[Ran], list[Any]]:
    """Wait for the tasks; each has had what it asked for, and no GPU two tasks at once."""
    records = [task.wait(timeout=patient(240)) for task in tasks]
    assert {record.state for record in records} == {"SUCCEEDED"}, [r.error for r in records if r.error]
    judged = [
        judge(ask, record, machine_of[str(record.worker)]) for (ask, _), record in zip(asked, records, strict=True)
    ]
    assert [wrong for wrong, _ in judged if wrong] == []
    capacity = {card.uuid: card.mib for machine in MACHINES for card in machine.cards}
    if twice := double_bookings([one for _, one in judged], capacity):
        raise BrokenPromise(f"GPUs were given to two tasks at once: {twice}")
    if again := [record.id for record in records if record.attempt != 1]:
        raise BrokenPromise(f"tasks have run twice: {again}")
    ran = [
        Ran(
            task=record.id,
            ask=ask,
            priority=priority,
            worker=str(record.worker),
            machine=machine_of[str(record.worker)],
            gpus=frozenset(one.gpus),
        )
        for (ask, priority), record, (_, one) in zip(asked, records, judged, strict=True)
    ]
    return ran, records


def judge(ask: Ask, record: Any, machine: Machine) -> tuple[str, Span]:
    """Return what is wrong with where a task ran, and what its child says of itself."""
    cards = {card.uuid: card for card in machine.cards}
    one = span(record.id, record.result)
    problem = wrong_place(ask, machine, one.gpus)
    wrong = f"{record.id} asks for {dict(ask.resources)}: {problem}" if problem else ""
    mib = ask.share_mib(cards[one.gpus[0]]) if ask.shares and not wrong else None
    return wrong, span(record.id, record.result, mib)


@pytest.fixture(scope="module")
def machine_of(long_fleet: TestFleet) -> dict[str, Machine]:
    """The workers of all tests here, each with its machine."""
    return start_fleet(long_fleet)


def told(most: Mapping[tuple[str, str], int], allowed: int, ran: Collection[Ran]) -> list[str]:
    asks = {one.task: dict(one.ask.resources) for one in ran}
    return [
        f"{worker} left {asks[task]} for {times} looks" for (worker, task), times in most.items() if times > allowed
    ]


@pytest.mark.timeout(1200)
def test_random_asks_on_six_machines(long_fleet: TestFleet, machine_of: Mapping[str, Machine]) -> None:
    fleet = long_fleet
    asked, choice = random_asks(TASKS), random.Random(SEED)

    with BrokerLog(client=fleet.broker.client) as log:
        tasks = [submit_one(fleet, *one, sleep_seconds=round(choice.uniform(0, 0.3), 2)) for one in asked]
        ran, records = all_ran(asked, tasks, machine_of)
        eventually(lambda: fleet.broker.client.zcard("gpuflow.ready") == 0, what="an empty ready index")
        events = log.events()

    most = looks_in_vain(ran, events, machine_of, whole=True)
    assert told(most, MOST_LOOKS_IN_VAIN_RESERVED, ran) == []
    used = Counter(one.worker for one in ran)
    print(f"\n{TASKS} tasks of {len({record.queue for record in records})} queues; tasks by worker: {dict(used)}")
    print(f"looks of an idle worker that left a task: at most {max(most.values(), default=0)} in a row")


@pytest.mark.timeout(1200)
def test_the_oldest_that_fits_goes_first(
    long_fleet: TestFleet, machine_of: Mapping[str, Machine], tmp_path: Path
) -> None:
    """Tasks for one GPU or none are kept from nothing by reservations, so that order is all that decides.

    They all wait before the first may end, so how many wait does not depend on the machine. Each worker may have chosen
    once by what waited a moment before, and so pass over a task once.
    """
    fleet, gate = long_fleet, tmp_path / "gate"
    asked = random_asks(WAITING, suits=lambda ask: ask.most <= 1 and not ask.shares)

    with BrokerLog(client=fleet.broker.client) as log:
        tasks = [submit_one(fleet, *one, until_exists=str(gate)) for one in asked]
        assert fleet.broker.client.zcard("gpuflow.ready") < 100, "a worker does not see all queues at once"
        gate.touch()
        ran, _ = all_ran(asked, tasks, machine_of)
        events = log.events()

    passed = passed_over(ran, events)
    assert {task: by for task, by in passed.items() if len(by) > len(machine_of)} == {}
    most = looks_in_vain(ran, events, machine_of, whole=False)
    assert told(most, MOST_LOOKS_IN_VAIN, ran) == []
    print(f"\n{WAITING} tasks; passed over at most {max(map(len, passed.values()), default=0)} times")
