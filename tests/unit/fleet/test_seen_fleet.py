"""What a submitter remembers of the fleet: for a moment, and longer where reading it takes long."""

from __future__ import annotations

from typing import Any

from gpuflow.broker.keys import Keys
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.fleet.seen_fleet import FRESH_SECONDS, READ_SHARE, SeenFleet
from gpuflow.routing.capability import Capability, GpuCapability

GPU = GpuCapability(uuid="GPU-1", index=0, names=("a100",), vram_gb=80, total_mib=81_920)


class Registry:
    """A Redis client that answers as one with some workers does; each reading takes `takes` seconds of `now`."""

    def __init__(self, *capabilities: Capability) -> None:
        self.capabilities = list(capabilities)
        self.takes = 0.0
        self.now = 100.0
        self.read = 0

    def smembers(self, key: str) -> set[str]:
        self.read += 1
        return {str(number) for number in range(len(self.capabilities))}

    def pipeline(self, **_: Any) -> Registry:
        return self

    def time(self) -> None: ...

    def hgetall(self, key: str) -> None: ...

    def pttl(self, key: str) -> None: ...

    def execute(self) -> list[Any]:
        self.now += self.takes
        answers: list[Any] = [(int(self.now), 0)]
        for number, capability in enumerate(self.capabilities):
            entry = WorkerEntry(id=str(number), state=WorkerState.IDLE, capability=capability.to_dict())
            answers += [entry.to_hash(), 60_000]
        return answers


def seen(registry: Any) -> SeenFleet:
    return SeenFleet(registry, Keys(), clock=lambda: registry.now)


def test_many_submits_of_a_second_read_the_registry_once() -> None:
    registry = Registry(Capability(gpus=(GPU,)))

    assert all(seen(registry).has_gpu() for _ in range(100))

    assert registry.read == 1


def test_a_worker_that_comes_is_seen_a_second_later() -> None:
    registry = Registry(Capability())
    assert not seen(registry).has_gpu()
    registry.capabilities.append(Capability(gpus=(GPU,)))

    registry.now += FRESH_SECONDS

    assert seen(registry).has_gpu()


def test_a_registry_that_takes_long_to_read_is_read_less_often() -> None:
    registry = Registry(Capability())
    registry.takes = 0.5
    seen(registry).capabilities()

    registry.now += READ_SHARE * registry.takes - 0.1
    seen(registry).capabilities()
    assert registry.read == 1

    registry.now += 0.1
    seen(registry).capabilities()
    assert registry.read == 2


def test_each_fleet_is_seen_for_itself() -> None:
    with_gpu, without = Registry(Capability(gpus=(GPU,))), Registry(Capability())

    assert seen(with_gpu).has_gpu()
    assert not seen(without).has_gpu()
