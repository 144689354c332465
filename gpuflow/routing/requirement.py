"""What a task asks of the machine that runs it: the one value that decides its queue.

Anyone above routing may build, store and compare requirements. A requirement is canonical: two asks that
mean the same are equal, so they land in the same queue. Ordered alternatives are several requirements, one
queue each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from gpuflow.errors import GPUFlowError
from gpuflow.routing.gpu_names import normalise_name

#: Newest schema number of `to_dict()`; readers accept this one and those before.
REQUIREMENT_SCHEMA: Final = 2
#: Fields that came with schema 2. An ask without them is written as schema 1, so that older workers serve it on.
_SINCE_2: Final = ("disk_gib", "compute_capability_min", "gpu_share", "gpu_shared")

#: No machine has more GPUs; a larger count is a card's number without its letters ("4090" for "RTX4090").
MAX_GPU_COUNT: Final = 1024

#: Words that a queue name uses for itself (see `gpuflow.routing.queue_names`), so no GPU may be called so.
_RESERVED_NAMES: Final = re.compile(
    r"x\d+(?:to\d+)?|(?:max|ram|disk|shared)\d+[gm]|share\d+m?|cc\d+|cpu|gpu|h[0-9a-f]{16}"
)
_GPU_NAME: Final = re.compile(r"[a-z*?][a-z0-9*?]*")
_COMPUTE: Final = re.compile(r"([1-9][0-9]?)(?:\.([0-9]))?")


def is_gpu_name(name: str) -> bool:
    """Whether a normalised name or glob can be that of a GPU."""
    return _GPU_NAME.fullmatch(name) is not None and _RESERVED_NAMES.fullmatch(name) is None


def compute_version(text: str) -> tuple[int, int] | None:
    """Return a CUDA compute capability such as "8.0" as numbers that compare, or None when it is none."""
    found = _COMPUTE.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2] or 0))


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """An ask, complete and comparable. Raises GPUFlowError when it contradicts itself.

    `gpu_count` GPUs of one kind (0 = no GPU), up to `gpu_count_max` where more help. `gpu_names` are
    lower-case globs of short names, any of which will do. `vram_gb_min` and `vram_gb_max` are memory on the
    box of each GPU, in GB. `compute_capability_min` is a CUDA compute capability such as "8.0". `cpu` is a
    number of CPUs, `memory_mib` memory of the machine, `disk_gib` what must be free where results are
    written, `labels` are globs that the worker's labels must match; a label asked for with "" need only be
    there.

    A share of one GPU is either `gpu_share`, a fraction of its memory above 0 and below 1, or `gpu_shared`:
    `vram_gb_min` of it, whatever the size of the GPU.
    """

    gpu_count: int = 0
    gpu_count_max: int | None = None
    gpu_names: tuple[str, ...] = ()
    vram_gb_min: float | None = None
    vram_gb_max: float | None = None
    cpu: float | None = None
    memory_mib: int | None = None
    labels: tuple[tuple[str, str], ...] = ()
    disk_gib: float | None = None
    compute_capability_min: str | None = None
    gpu_share: float | None = None
    gpu_shared: bool = False

    def __post_init__(self) -> None:
        names = {normalise_name(name) for name in self.gpu_names}
        maximum = None if self.gpu_count_max == self.gpu_count else self.gpu_count_max
        self._set("gpu_names", () if "" in names else tuple(sorted(names)))
        self._set("gpu_count_max", maximum)
        self._set("vram_gb_min", _rounded(self.vram_gb_min or None, 1024))
        self._set("vram_gb_max", _rounded(self.vram_gb_max, 1024))
        self._set("cpu", _rounded(self.cpu or None, 1000))
        self._set("memory_mib", self.memory_mib or None)
        self._set("disk_gib", _rounded(self.disk_gib or None, 1024))
        self._set("compute_capability_min", _compute(self.compute_capability_min))
        self._set("gpu_share", _thousandths(self.gpu_share))
        self._set("labels", tuple(sorted((str(key), str(value)) for key, value in self.labels)))
        self._check()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        if not 0 <= self.gpu_count <= MAX_GPU_COUNT or (self.gpu_count_max or 0) > MAX_GPU_COUNT:
            count = max(self.gpu_count, self.gpu_count_max or 0)
            raise GPUFlowError(
                f"{count} GPUs is not a count from 0 to {MAX_GPU_COUNT}; "
                f"a card is named with its letters, such as RTX4090"
            )
        if self.gpu_count_max is not None and self.gpu_count_max < self.gpu_count:
            raise GPUFlowError(f"at most {self.gpu_count_max} GPUs is below at least {self.gpu_count}")
        asks_gpu = self.gpu_names or self.vram_gb_min or self.vram_gb_max is not None or self.gpu_count_max
        if not self.gpu_count and asks_gpu:
            raise GPUFlowError("a GPU's name or memory is given, but 0 GPUs; ask for at least 1 or leave them out")
        if not self.gpu_count and (self.compute_capability_min or self.shares):
            what = "a share of a GPU" if self.shares else "a compute capability"
            raise GPUFlowError(f"{what} is given, but 0 GPUs; ask for at least 1 or leave it out")
        self._check_share()
        if self.vram_gb_max is not None and self.vram_gb_max < (self.vram_gb_min or 0.001):
            raise GPUFlowError(
                f"at most {self.vram_gb_max:g} GB per GPU is below at least {self.vram_gb_min or 0:g} GB"
            )
        for value in (self.vram_gb_min, self.cpu, self.memory_mib, self.disk_gib):
            if value is not None and not 0 < value < 2**40:
                raise GPUFlowError(f"{value:g} is not a sensible amount of memory, disk or CPUs")
        for name in self.gpu_names:
            if not is_gpu_name(name):
                raise GPUFlowError(f"{name!r} is not the name of a GPU; write a name such as A100 or RTX4090")
        keys = [key for key, _ in self.labels]
        if len(set(keys)) != len(keys) or "" in keys:
            raise GPUFlowError("each label is asked for once and has a name")

    def _check_share(self) -> None:
        if self.shares and (self.gpu_count > 1 or self.gpu_count_max is not None):
            raise GPUFlowError(
                f"a share is of one GPU, but {self.gpu_count_max or self.gpu_count} GPUs are asked for; "
                "ask for 1, or for no share"
            )
        if self.gpu_share is not None and self.gpu_shared:
            raise GPUFlowError("a share is given by memory and by a fraction; keep one")
        if self.gpu_shared and self.vram_gb_min is None:
            raise GPUFlowError("a share of a GPU is asked for without its size; give memory (8GB) or a fraction (0.5)")

    @property
    def shares(self) -> bool:
        """Whether a part of one GPU is enough."""
        return self.gpu_shared or self.gpu_share is not None

    def queue_name(self) -> str:
        """Return the name of the queue that carries this requirement, such as gpu-a100-80g-x4."""
        from gpuflow.routing.queue_names import queue_name

        return queue_name(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: what is asked for and nothing else, under the oldest schema that can say it."""
        newer = any(getattr(self, name) for name in _SINCE_2)
        data: dict[str, Any] = {"schema": REQUIREMENT_SCHEMA if newer else REQUIREMENT_SCHEMA - 1}
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                data[item.name] = dict(value) if item.name == "labels" else value
        if self.gpu_names:
            data["gpu_names"] = list(self.gpu_names)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read `to_dict()`. Raises GPUFlowError for a newer schema, which this gpuflow cannot read."""
        schema = data.get("schema", REQUIREMENT_SCHEMA)
        if schema > REQUIREMENT_SCHEMA:
            raise GPUFlowError(
                f"the requirement has schema {schema}, this gpuflow reads {REQUIREMENT_SCHEMA}; upgrade it"
            )
        known = {item.name: data[item.name] for item in fields(cls) if item.name in data}
        known["gpu_names"] = tuple(known.get("gpu_names", ()))
        known["labels"] = tuple(dict(known.get("labels", {})).items())
        return cls(**known)


def _rounded(value: float | None, steps: int) -> float | None:
    """Round to 1/steps, at least one (a MiB of a GB, a thousandth of a CPU): equal asks are equal values."""
    if value is None or value <= 0:
        return value
    if not math.isfinite(value):
        raise GPUFlowError(f"{value:g} is not a sensible amount of memory, disk or CPUs")
    return max(1, round(value * steps)) / steps


def _compute(text: str | None) -> str | None:
    if text is None:
        return None
    version = compute_version(text)
    if version is None:
        raise GPUFlowError(f"{text!r} is not a compute capability; give one such as 8.0")
    return f"{version[0]}.{version[1]}"


def _thousandths(share: float | None) -> float | None:
    """Round a share down to a thousandth, so that three thirds fit one GPU; the whole of a GPU is no share."""
    if share is None or share == 1:
        return None
    if not 0 < share < 1:
        raise GPUFlowError(f"{share:g} is not a share of a GPU; give a fraction above 0 and below 1")
    return max(1, math.floor(share * 1000 + 1e-6)) / 1000
