"""What a worker offers: its GPUs with short names and memory on the box, its CPUs, memory and labels.

Built by the worker from its hardware, stored in the registry, read by whoever matches. It knows the
hardware by the shape of its fields alone, since the probe lies above routing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Protocol, Self

from gpuflow.errors import GPUFlowError
from gpuflow.routing.catalogue import identify

#: Schema number of `to_dict()`; readers accept this one and those before.
CAPABILITY_SCHEMA: Final = 1


class GpuFacts(Protocol):
    """A GPU as the probe reports it."""

    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def uuid(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def total_mib(self) -> int: ...  # noqa: D102
    @property
    def mig_parent_uuid(self) -> str | None: ...  # noqa: D102
    @property
    def compute_capability(self) -> str | None: ...  # noqa: D102


class HardwareFacts(Protocol):
    """A machine as the probe reports it."""

    @property
    def gpus(self) -> Sequence[GpuFacts]: ...  # noqa: D102
    @property
    def cpu_count(self) -> int: ...  # noqa: D102
    @property
    def memory_total_mib(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class GpuCapability:
    """One GPU or MIG slice; `names` begins with the short one, `vram_gb` is the memory on the box in GB.

    `room_mib` is what may be handed out of it now to those that share it; None: all of it.
    """

    uuid: str
    index: int
    names: tuple[str, ...]
    vram_gb: float
    total_mib: int
    mig_parent_uuid: str | None = None
    compute_capability: str | None = None
    room_mib: int | None = None

    @property
    def name(self) -> str:
        """The short name."""
        return self.names[0]

    @property
    def kind(self) -> tuple[str, float]:
        """Name and memory: GPUs of one kind may share a task."""
        return self.names[-1], self.vram_gb


@dataclass(frozen=True, kw_only=True)
class Capability:
    """All that decides whether a task fits a worker; a label without a value has the value "".

    `disk_free_mib` is what is free where it writes results; None: unknown, so that no ask for disk fits. With less than
    `disk_floor_mib` free, nothing fits.
    """

    gpus: tuple[GpuCapability, ...] = ()
    cpu_count: float = 1
    memory_mib: int = 0
    labels: tuple[tuple[str, str], ...] = ()
    disk_free_mib: int | None = None
    disk_floor_mib: int = 0

    @classmethod
    def of(
        cls,
        hardware: HardwareFacts,
        labels: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        disk_free_mib: int | None = None,
        disk_floor_mib: int = 0,
    ) -> Self:
        """Build it from a probe, the labels (`--label k=v`), the tags (WORKER_TAGS), without values, and the disk."""
        gpus = []
        for gpu in hardware.gpus:
            kind = identify(gpu.name, gpu.total_mib)
            gpus.append(
                GpuCapability(
                    uuid=gpu.uuid,
                    index=gpu.index,
                    names=kind.names,
                    vram_gb=kind.vram_gb,
                    total_mib=gpu.total_mib,
                    mig_parent_uuid=gpu.mig_parent_uuid,
                    compute_capability=gpu.compute_capability,
                )
            )
        return cls(
            gpus=tuple(gpus),
            cpu_count=hardware.cpu_count,
            memory_mib=hardware.memory_total_mib,
            labels=tuple(sorted({**dict.fromkeys(tags, ""), **(labels or {})}.items())),
            disk_free_mib=disk_free_mib,
            disk_floor_mib=disk_floor_mib,
        )

    @property
    def lacks_disk(self) -> bool:
        """Whether so little disk is free that nothing may be begun."""
        return self.disk_free_mib is not None and self.disk_free_mib < self.disk_floor_mib

    def only(self, uuids: Collection[str]) -> Self:
        """Return the same worker with these of its GPUs alone, such as those that are free."""
        return replace(self, gpus=tuple(gpu for gpu in self.gpus if gpu.uuid in uuids))

    def with_room(self, room_mib: Mapping[str, int]) -> Self:
        """Return the same worker with these of its GPUs alone, and what may be handed out of each to sharers."""
        gpus = tuple(replace(gpu, room_mib=room_mib[gpu.uuid]) for gpu in self.gpus if gpu.uuid in room_mib)
        return replace(self, gpus=gpus)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; what is free now is not part of it, but for the disk."""
        data = {"schema": CAPABILITY_SCHEMA, **asdict(self), "labels": dict(self.labels)}
        for gpu in data["gpus"]:
            del gpu["room_mib"]
        if self.disk_free_mib is None:
            del data["disk_free_mib"]
        if not self.disk_floor_mib:
            del data["disk_floor_mib"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read `to_dict()`. Raises GPUFlowError for a newer schema, which this gpuflow cannot read."""
        schema = data.get("schema", CAPABILITY_SCHEMA)
        if schema > CAPABILITY_SCHEMA:
            raise GPUFlowError(f"the capability has schema {schema}, this gpuflow reads {CAPABILITY_SCHEMA}")
        known = {item.name: data[item.name] for item in fields(cls) if item.name in data}
        gpu_fields = {item.name for item in fields(GpuCapability)}
        known["gpus"] = tuple(
            GpuCapability(**{**{k: v for k, v in gpu.items() if k in gpu_fields}, "names": tuple(gpu["names"])})
            for gpu in known.get("gpus", ())
        )
        known["labels"] = tuple(sorted(dict(known.get("labels", {})).items()))
        return cls(**known)
