"""Which GPUs of a worker a task gets, or why it gets none. Used by `gpuflow.routing.fit` alone. Pure and total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from gpuflow.routing.capability import GpuCapability
from gpuflow.routing.gpu_names import name_matches
from gpuflow.routing.reasons import Reason, gap, reason
from gpuflow.routing.requirement import Requirement, compute_version
from gpuflow.routing.units import show_gb

#: A GPU of another name is nearer than none.
_OTHER_NAME: Final = 0.9


def choose(ask: Requirement, gpus: Sequence[GpuCapability]) -> tuple[str, ...] | Reason:
    """Return the UUIDs to give: of the smallest kind that will do, by index; or the first requirement that fails."""
    if not gpus:
        return reason("gpu_count", _count(ask), "none", "the worker has none")
    named = [gpu for gpu in gpus if name_matches(ask.gpu_names, gpu.names)]
    if not named:
        has = ", ".join(f"{count}x {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
        return reason("gpu_name", " or ".join(ask.gpu_names), has, f"the worker has {has}", _OTHER_NAME)
    low, high = ask.vram_gb_min or 0, ask.vram_gb_max
    sized = [gpu for gpu in named if low <= gpu.vram_gb and (high is None or gpu.vram_gb <= high)]
    if not sized:
        return _vram_reason(ask, named)
    able = [gpu for gpu in sized if _computes(ask, gpu)]
    if not able:
        return _compute_reason(ask, sized)
    if ask.shares:
        return _share(ask, able)
    usable = [gpu for gpu in able if ask.gpu_count == 1 or gpu.mig_parent_uuid is None]
    usable.sort(key=lambda gpu: (gpu.vram_gb, gpu.kind, gpu.index, gpu.uuid))
    groups = [list(group) for _, group in groupby(usable, key=lambda gpu: gpu.kind)]
    for group in groups:
        if len(group) >= ask.gpu_count:
            return tuple(gpu.uuid for gpu in group[: ask.gpu_count_max or ask.gpu_count])
    most = max((len(group) for group in groups), default=0)
    kind = " of one kind" if len(groups) > 1 else ""
    clause = f"the worker has {most} such{kind}" if most else "the worker has MIG slices only"
    return reason("gpu_count", _count(ask), str(most), clause, gap(ask.gpu_count, most))


def share_of(ask: Requirement, gpu: GpuCapability) -> int | None:
    """Return how much of a GPU's memory a share takes, in MiB as the driver counts; None when it takes all."""
    if ask.gpu_share is not None:
        return int(gpu.total_mib * ask.gpu_share)
    if ask.gpu_shared and gpu.vram_gb > 0:
        return min(gpu.total_mib, int(gpu.total_mib * (ask.vram_gb_min or 0) / gpu.vram_gb))
    return None


def _share(ask: Requirement, gpus: list[GpuCapability]) -> tuple[str, ...] | Reason:
    """Return the GPU that a share is taken from: of the smallest kind, the fullest that has room."""

    def room(gpu: GpuCapability) -> int:
        return gpu.total_mib if gpu.room_mib is None else gpu.room_mib

    roomy = [gpu for gpu in gpus if room(gpu) >= (share_of(ask, gpu) or 0)]
    if roomy:
        return (min(roomy, key=lambda gpu: (gpu.vram_gb, room(gpu), gpu.index, gpu.uuid)).uuid,)
    most = max(gpus, key=room)
    asked_mib = share_of(ask, most) or 0
    has = show_gb(room(most) / 1024)
    clause = f"at most {has} of one can be shared now ({most.name})"
    return reason("share", f"a share of {show_gb(asked_mib / 1024)} of a GPU", has, clause, gap(asked_mib, room(most)))


def _computes(ask: Requirement, gpu: GpuCapability) -> bool:
    """Whether a GPU has the compute capability; one that does not tell its own has not."""
    if ask.compute_capability_min is None:
        return True
    wanted, has = compute_version(ask.compute_capability_min), compute_version(gpu.compute_capability or "")
    return wanted is not None and has is not None and has >= wanted


def _compute_reason(ask: Requirement, gpus: list[GpuCapability]) -> Reason:
    asked = f"compute capability {ask.compute_capability_min} or more"
    known = [(version, gpu) for gpu in gpus if (version := compute_version(gpu.compute_capability or ""))]
    if not known:
        return reason("compute_capability", asked, "unknown", "the worker's GPUs do not tell theirs")
    version, best = max(known, key=lambda pair: pair[0])
    wanted = compute_version(ask.compute_capability_min or "") or version
    has = f"{version[0]}.{version[1]}"
    missing = gap(wanted[0] + wanted[1] / 10, version[0] + version[1] / 10)
    return reason("compute_capability", asked, has, f"the worker's best GPU has {has} ({best.name})", missing)


def _vram_reason(ask: Requirement, gpus: list[GpuCapability]) -> Reason:
    low, high = ask.vram_gb_min, ask.vram_gb_max
    largest = max(gpus, key=lambda gpu: gpu.vram_gb)
    smallest = min(gpus, key=lambda gpu: gpu.vram_gb)
    whose = "a share of {}" if ask.gpu_shared else "{} per GPU"
    if low is not None and largest.vram_gb < low:
        asked, nearest, which, bound = whose.format(show_gb(low)), largest, "largest", low
    elif high is not None and smallest.vram_gb > high:
        asked, nearest, which, bound = f"at most {show_gb(high)} per GPU", smallest, "smallest", high
    else:
        asked = f"{show_gb(low or 0)} to {show_gb(high or 0)} per GPU"
        nearest, which, bound = largest, "largest", high or 0
    has = show_gb(nearest.vram_gb)
    clause = f"the worker's {which} has {has} ({nearest.name})"
    return reason("share" if ask.gpu_shared else "vram", asked, has, clause, gap(bound, nearest.vram_gb))


def _count(ask: Requirement) -> str:
    return "1 GPU" if ask.gpu_count == 1 else f"{ask.gpu_count} GPUs"
