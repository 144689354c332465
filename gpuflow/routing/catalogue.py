"""The catalogue of GPUs: from the name and memory that NVML reports to short names and memory on the box.

Used by `gpuflow.routing.capability`. The data are in configs/gpus/catalogue.yaml. A GPU that is not listed
works by its NVML name and its memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuflow.errors import GPUFlowError
from gpuflow.routing.gpu_names import normalise_name, words_of
from gpuflow.routing.units import gpu_memory_gb
from gpuflow.spec.presets import configs_root

#: Sizes that vendors print on boxes, in GB, for GPUs that the catalogue does not know.
_BOX_SIZES: Final = (
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    11,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    80,
    94,
    96,
    128,
    141,
    180,
    192,
    288,
)
#: What a driver reports over the size on the box: 0.937 (T4, L4 and L40S, with ECC) to 1.
_LEAST_SHARE: Final = 0.88
_MOST_SHARE: Final = 1.002
#: The name of a MIG slice: compute slices and memory; a compute instance stands before, an attribute after.
_MIG_PROFILE: Final = re.compile(r"\bMIG (?:\d+c\.)?(\d+)g\.(\d+)gb", re.IGNORECASE)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9]*$")
    memory_gb: tuple[float, ...] = Field(min_length=1)
    also: tuple[str, ...] = ()


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: int = Field(alias="schema", ge=1, le=1)
    gpus: tuple[_Entry, ...]


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """What a GPU is: all names that users may ask for it by, the short one first, and GB on the box."""

    names: tuple[str, ...]
    vram_gb: float


def identify(nvml_name: str, total_mib: int) -> GpuKind:
    """Return what a GPU is, from its NVML name and total memory.

    A MIG slice has the names of its profile (`mig3g40gb`) and of its parent with `mig` before (`miga100`),
    never the parent's own: who asks for an A100 gets a whole one.
    """
    profile = _MIG_PROFILE.search(nvml_name)
    if profile is not None:
        parent = identify(nvml_name[: profile.start()], total_mib)
        return GpuKind(names=(f"mig{profile[1]}g{profile[2]}gb", f"mig{parent.names[0]}"), vram_gb=float(profile[2]))
    words = [word for word in words_of(nvml_name) if gpu_memory_gb(word) is None]
    full = normalise_name("-".join(words)) or "unknown"
    entry = _longest_entry(words)
    if entry is None:
        return GpuKind(names=(full,), vram_gb=_box_size(total_mib, _BOX_SIZES))
    names = dict.fromkeys((entry.name, *entry.also, full))
    return GpuKind(names=tuple(names), vram_gb=_box_size(total_mib, entry.memory_gb))


def _longest_entry(words: list[str]) -> _Entry | None:
    known = _entries(configs_root() / "gpus" / "catalogue.yaml")
    for count in range(len(words), 0, -1):
        entry = known.get(normalise_name("-".join(words[:count])))
        if entry is not None:
            return entry
    return None


def _box_size(total_mib: int, sizes: tuple[float, ...]) -> float:
    """Return the size on the box that the reported memory means: the nearest that is plausible."""
    reported = total_mib / 1024
    plausible = [size for size in sizes if _LEAST_SHARE * size <= reported <= _MOST_SHARE * size]
    if plausible:
        return float(min(plausible, key=lambda size: abs(size - reported)))
    if sizes is not _BOX_SIZES:
        return _box_size(total_mib, _BOX_SIZES)
    return float(round(reported, 1))


@lru_cache
def _entries(path: Path) -> dict[str, _Entry]:
    """Read the catalogue, by name. Raises GPUFlowError when it is missing or wrong."""
    try:
        content = _File.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise GPUFlowError(f"the GPU catalogue {path} cannot be used: {error}; reinstall gpuflow") from error
    return {entry.name: entry for entry in content.gpus}
