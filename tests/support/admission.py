"""What the tests of admission stand on: a registry of queues in memory, and GPUs that nobody else uses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuflow.broker.keys import Keys
from gpuflow.fleet.gpu_usage import UsageReader
from gpuflow.fleet.hardware_nvml import GpuUse, Uses
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.admission import Admission
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.queue_matcher import QueueMatcher
from gpuflow.worker.reserving import Reserving
from gpuflow.worker.sessions.table import Sessions
from gpuflow.worker.slots import Limits

KEYS = Keys()
TOTAL_MIB = 81_920


def gpu(index: int) -> GpuCapability:
    return GpuCapability(uuid=f"GPU-{index}", index=index, names=("a100",), vram_gb=80.0, total_mib=TOTAL_MIB)


def machine(gpus: int = 2, **more: Any) -> Capability:
    return Capability(**{"gpus": tuple(gpu(n) for n in range(gpus)), "cpu_count": 8, "memory_mib": 16_000, **more})


class Pipe:
    """Commands that are answered together."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._answers: list[Any] = []

    def hget(self, key: str, field: str) -> None:
        self._client.asked.append(key)
        self._answers.append(self._client.hashes.get(key))

    def execute(self) -> list[Any]:
        if self._client.before_answer is not None:
            self._client.before_answer()
        return self._answers


class Client:
    """As much of a Redis client as queue matcher and reservations use."""

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}
        self.scores: dict[str, dict[str, float]] = {}
        self.classes: set[str] = set()
        self.asked: list[str] = []
        self.before_answer: Any = None

    def pipeline(self, transaction: bool = True) -> Pipe:
        return Pipe(self)

    def sadd(self, key: str, *names: str) -> int:
        self.classes.update(names)
        return len(names)

    def zadd(self, key: str, scores: Mapping[str, float]) -> int:
        self.scores.setdefault(key, {}).update(scores)
        return len(scores)

    def zscore(self, key: str, name: str) -> None:
        return None

    def evalsha(self, *arguments: Any) -> list[str]:
        return ["tag-of-the-first", "task-of-the-first"]

    def delete(self, *keys: str) -> int:
        return len(keys)

    def register(self, *asks: Requirement) -> list[str]:
        """Register the queues of these requirements, and return their names."""
        for ask in asks:
            self.hashes[KEYS.queue(ask.queue_name())] = json.dumps(ask.to_dict())
        return [ask.queue_name() for ask in asks]


def all_idle(uuids: Sequence[str]) -> Uses:
    """Answer as a driver whose GPUs nobody uses."""
    uses = {uuid: GpuUse(uuid=uuid, total_mib=TOTAL_MIB, used_mib=0, processes=()) for uuid in uuids}
    return Uses(uses=uses, failed={})


def worker(
    client: Client,
    folder: Path,
    capability: Capability,
    name: str = "w1",
    *,
    warm: bool = False,
    query: Callable[[Sequence[str]], Uses] = all_idle,
    **limits: Any,
) -> Admission:
    """Return the admission of one worker of the machine whose lock directory is `folder`; `warm`: it keeps sessions.

    `query` answers as the driver.
    """
    clock = iter(range(10**9))
    gpus = MachineGpus(capability.gpus, folder, clock=lambda: next(clock), reader=UsageReader(query))
    log_dir = folder.parent / f"logs-{name}"
    sessions = Sessions(
        idle_seconds=3600, log_dir=log_dir, log_max_bytes=1 << 20, release=gpus.release, on_change=lambda: None
    )
    return Admission(
        QueueMatcher(client, KEYS, capability),  # type: ignore[arg-type]
        Limits(**{"cpu_jobs": 4, **limits}),
        gpus,
        Reserving(gpus, client, KEYS, name),  # type: ignore[arg-type]
        sessions=sessions if warm else None,
    )


def locks_open(folder: Path) -> list[str]:
    """Return the lock files of GPUs and shares that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = entry.readlink()
        except OSError:
            continue
        if target.parent == folder and target.name.startswith(("gpu-", "share-")):
            found.append(target.name)
    return sorted(found)
