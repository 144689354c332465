"""Whether a worker can start a task now, and what it waits for if not. Pure.

Both sides ask the same question here: the worker before each pop (`worker.placements`), of what it holds, and `explain`
(`routing.situation`), of what the worker reported with its last heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal, Self

from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.fit import match
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.units import show_mib

#: A GPU with more foreign memory than this does not count as free for a task that does not say what it needs.
FOREIGN_TOLERATED_MIB: Final = 512


@dataclass(frozen=True, kw_only=True)
class HostUsage:
    """What running jobs and loaded models use of a worker's host, GPUs apart.

    `cpus` are those that running jobs, and models that answer now, have declared; `memory_mib` is what running jobs and
    all loaded models have declared. `undeclared_jobs` counts jobs with neither declared CPUs nor GPUs, of which
    `undeclared_limit` may run at once (None: no such limit). `idle_memory_mib` is what models have declared that idle
    and would be evicted for a task that needs it: it is no part of `memory_mib`.
    """

    cpus: float = 0.0
    memory_mib: int = 0
    undeclared_jobs: int = 0
    undeclared_limit: int | None = None
    idle_memory_mib: int = 0

    def with_idle(self) -> Self:
        """Return the usage where nothing that idles is evicted."""
        return replace(self, memory_mib=self.memory_mib + self.idle_memory_mib, idle_memory_mib=0)

    def plus(self, asked: Requirement) -> Self:
        """Return the usage once another task runs too."""
        return replace(self, cpus=self.cpus + (asked.cpu or 0), memory_mib=self.memory_mib + (asked.memory_mib or 0))

    def blocks(self, asked: Requirement, capability: Capability) -> str:
        """Return why the host has no place for a task now, as a clause; "" if it has one."""
        if asked.cpu and asked.cpu + self.cpus > capability.cpu_count:
            return f"{self.cpus:g} of its {capability.cpu_count:g} CPUs are in use"
        if asked.memory_mib and asked.memory_mib + self.memory_mib > capability.memory_mib:
            return f"{show_mib(self.memory_mib)} of its {show_mib(capability.memory_mib)} of memory are in use"
        if asked.gpu_count or asked.cpu or self.undeclared_limit is None:
            return ""
        if self.undeclared_jobs < self.undeclared_limit:
            return ""
        return f"it runs as many tasks without declared CPUs as it may at once ({self.undeclared_limit})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; without what idle models use, where none does."""
        return {name: value for name, value in asdict(self).items() if value or name != "idle_memory_mib"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read `to_dict()`; fields of a newer version are ignored."""
        return cls(**{item.name: data[item.name] for item in fields(cls) if item.name in data})


@dataclass(frozen=True, kw_only=True)
class GpuGrant:
    """GPUs that one holder has: whole (`share_mib` None), or so many MiB of each."""

    gpus: tuple[str, ...]
    share_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class FreeGpus:
    """The GPUs of a worker that could be given out now.

    `whole` are the UUIDs of those that nobody holds, `room_mib` what is left of each GPU for tasks that share it, and
    `foreign_mib` what processes outside gpuflow use, of each GPU that is held back for them.
    """

    whole: frozenset[str] = frozenset()
    room_mib: Mapping[str, int] = field(default_factory=dict)
    foreign_mib: Mapping[str, int] = field(default_factory=dict)

    def offered(self, asked: Requirement, capability: Capability) -> Capability:
        """Return the worker with those of its GPUs alone that such a task could be given now."""
        if not asked.gpu_count:
            return capability
        if asked.shares:
            return capability.with_room(self.room_mib)
        found = (
            offered_gpu(gpu, self.foreign_mib.get(gpu.uuid, 0), asks_memory=asked.vram_gb_min is not None)
            for gpu in capability.gpus
            if gpu.uuid in self.whole
        )
        return replace(capability, gpus=tuple(gpu for gpu in found if gpu is not None))

    def plus(self, grants: Iterable[GpuGrant], capability: Capability) -> Self:
        """Return what could be given out once these grants have been released."""
        whole, room_mib = set(self.whole), dict(self.room_mib)
        total_mib = {gpu.uuid: gpu.total_mib for gpu in capability.gpus}
        for grant in grants:
            for uuid in total_mib.keys() & set(grant.gpus):
                left_mib = total_mib[uuid] - self.foreign_mib.get(uuid, 0)
                released_mib = left_mib if grant.share_mib is None else grant.share_mib
                room_mib[uuid] = min(left_mib, room_mib.get(uuid, 0) + released_mib)
                if room_mib[uuid] >= left_mib - FOREIGN_TOLERATED_MIB:
                    whole.add(uuid)
        return replace(self, whole=frozenset(whole), room_mib=room_mib)


def offered_gpu(gpu: GpuCapability, foreign_mib: int, *, asks_memory: bool) -> GpuCapability | None:
    """Return what a GPU that nobody holds offers beside foreign processes, None for nothing.

    It offers the rest of its memory, for a task that says how much it needs.
    """
    if not foreign_mib:
        return gpu
    left_mib = max(0, gpu.total_mib - foreign_mib)
    if not asks_memory or not left_mib:
        return None
    tenths = int(gpu.vram_gb * left_mib / gpu.total_mib * 10)
    return replace(gpu, vram_gb=tenths / 10, total_mib=left_mib)


@dataclass(frozen=True, kw_only=True)
class ReservedBefore:
    """GPUs that are reserved for a task (`asked`) which goes before the task at hand.

    `seconds` are left until that task hopes to start: what ends before may still use its GPUs. None: not known.
    """

    gpus: tuple[str, ...]
    asked: Requirement
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a task may use now: these free GPUs, if its time limit is at most so many seconds (None: any)."""

    capability: Capability
    max_runtime_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Why a task cannot start now. `reason` is a clause about the host, "" for GPUs and reservations."""

    blocked_by: Literal["host", "gpus", "reservation"]
    reason: str = ""


def place(
    asked: Requirement, capability: Capability, usage: HostUsage, free: FreeGpus, reserved: ReservedBefore | None = None
) -> Placement | Wait:
    """Return what a task may use of a worker now, or what it waits for; `reserved` is what it has to leave free."""
    if reason := usage.blocks(asked, capability):
        return Wait(blocked_by="host", reason=reason)
    offered = free.offered(asked, capability)
    if reserved is None:
        return Placement(capability=offered) if match(asked, offered).fits else Wait(blocked_by="gpus")
    rest = offered.only([gpu.uuid for gpu in offered.gpus if gpu.uuid not in reserved.gpus])
    if match(asked, rest).fits and not usage.plus(reserved.asked).blocks(asked, capability):
        return Placement(capability=rest)
    if not match(asked, offered).fits:
        return Wait(blocked_by="gpus")
    if reserved.seconds is None or reserved.seconds <= 0:
        return Wait(blocked_by="reservation")
    return Placement(capability=offered, max_runtime_seconds=reserved.seconds)
