"""How a machine is kept free for a task that needs more than is free: the real admission and Lua on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.slots import Limits
from tests.support.fleet import Broker
from tests.support.virtual_fleet import Clock, Publisher, Taken, VirtualGpus, VirtualWorker

FOUR = Capability(
    gpus=tuple(
        GpuCapability(uuid=f"GPU-{index}", index=index, names=("a100",), vram_gb=80, total_mib=81920)
        for index in range(4)
    ),
    cpu_count=8,
    memory_mib=65536,
)
ONE_GPU, TWO_GPUS, ALL_GPUS = (Requirement(gpu_count=number) for number in (1, 2, 4))


@dataclass
class Place:
    """One machine with four GPUs and two workers."""

    clock: Clock
    publisher: Publisher
    gpus: VirtualGpus
    workers: list[VirtualWorker]
    numbers: Iterator[int] = field(default_factory=count)

    def ask(self, requirement: Requirement, limit: float | None = None, priority: int = 5) -> str:
        name = f"t{next(self.numbers)}"
        hints = {"x": "echo", **({"t": limit} if limit else {})}
        self.publisher.publish(name, requirement.queue_name(), requirement.to_dict(), priority, hints)
        return name

    def take(self, worker: int = 0, limit: float | None = None) -> dict[str, Taken]:
        """Let a worker take all that it can now, each with this time limit, and return that by task."""
        one = self.workers[worker]
        one.hear("")
        found: dict[str, Taken] = {}
        while answer := one.step():
            if isinstance(answer, Taken):
                one.begin(answer, limit)
                found[answer.task] = answer
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    broker, clock = Broker(tmp_path / "broker"), Clock()
    monkeypatch.setattr("gpuflow.worker.reserving.boot_seconds", clock)
    gpus = VirtualGpus(FOUR, clock)
    names = ("w1", "w2")
    workers = [VirtualWorker(name, broker.client, FOUR, gpus, clock, Limits(cpu_jobs=8)) for name in names]
    try:
        yield Place(clock, Publisher(broker.client), gpus, workers)
    finally:
        broker.close()


def test_a_queue_with_gpus_is_not_offered_beside_one_without(place: Place) -> None:
    place.ask(Requirement(cpu=1))
    place.ask(ONE_GPU)
    place.workers[0].step()  # learns what is ready

    place.workers[0].step()
    offered = [choice.queue for choice in place.workers[0].look.chosen]

    assert offered == ["cpu-1c"]


def test_small_tasks_behind_a_big_one_leave_it_the_gpus(place: Place) -> None:
    small = place.ask(ONE_GPU)
    running = place.take()
    big = place.ask(ALL_GPUS)
    later = place.ask(ONE_GPU)

    assert set(running) == {small}
    assert place.take() == {} and place.take(1) == {}
    reservation = place.gpus.reservation()
    assert reservation is not None and (reservation.task, len(reservation.gpus)) == (big, 4)

    place.workers[0].finish(running[small])
    assert set(place.take(1)) == {big}
    assert place.gpus.reservation() is None, "the task has begun on the other worker of the machine"
    assert later not in place.take()


def test_the_end_of_a_task_of_the_other_worker_is_known(place: Place) -> None:
    first = place.ask(ONE_GPU, limit=60)
    assert set(place.take(1, limit=60)) == {first}
    place.ask(ALL_GPUS)
    long, short = place.ask(ONE_GPU, limit=90), place.ask(ONE_GPU, limit=30)

    taken = place.take(0, limit=30)

    assert set(taken) == {short}, f"{long} would end after {first}"


def test_tasks_that_are_let_in_do_not_put_the_big_one_off(place: Place) -> None:
    place.ask(ONE_GPU, limit=60)
    place.take(limit=60)
    place.ask(ALL_GPUS)
    place.take()
    first = place.gpus.reservation()
    place.ask(ONE_GPU, limit=55)
    place.clock.now += 5
    assert len(place.take(limit=70)) == 1, "its worker gives it longer than it asked for"
    place.clock.now += 5

    place.take()

    second = place.gpus.reservation()
    assert first is not None and second is not None
    assert second.expires > first.expires and second.deadline == first.deadline == Clock().now + 60


def test_a_more_urgent_task_takes_the_reservation_over(place: Place) -> None:
    held = [place.ask(ONE_GPU) for _ in range(3)]
    assert set(place.take()) == set(held)
    place.ask(ALL_GPUS)
    place.take()
    urgent = place.ask(TWO_GPUS, priority=9)

    place.take()

    reservation = place.gpus.reservation()
    assert reservation is not None and (reservation.task, len(reservation.gpus)) == (urgent, 2)


def test_cpus_are_kept_for_a_big_task_too(place: Place) -> None:
    small = [place.ask(Requirement(gpu_count=1, cpu=2)) for _ in range(4)]
    running = place.take()
    assert set(running) == set(small)
    big = place.ask(Requirement(gpu_count=4, cpu=6))
    on_cpu = [place.ask(Requirement(cpu=2)) for _ in range(3)]
    place.workers[0].finish(running.pop(small[0]))

    assert place.take() == {}, f"{on_cpu} would take the CPUs of {big}"
    for taken in running.values():
        place.workers[0].finish(taken)
    assert set(place.take()) == {big, on_cpu[0]}


def test_the_reservation_of_a_worker_that_is_gone_ends_by_itself(place: Place) -> None:
    place.ask(ONE_GPU)
    place.take()
    big = place.ask(ALL_GPUS)
    place.take()
    mine = place.gpus.reservation()
    assert mine is not None and mine.worker == "w1"
    place.workers[0].client.delete(place.workers[0].keys.reserved(f"tag-{big}"))
    place.clock.now = mine.expires

    place.take(1)

    reservation = place.gpus.reservation()
    assert reservation is not None and (reservation.worker, reservation.task) == ("w2", big)
