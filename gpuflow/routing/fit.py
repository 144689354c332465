"""Does a task fit a worker, and if not, why? Pure and total: every pair has an answer, nothing is raised.

Used by the worker (with its free GPUs alone, to admit; with all of them, to subscribe), at submit and by
`explain`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Literal

from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.names import name_matches
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.units import show_gb, show_mib

ReasonKind = Literal["gpu_name", "vram", "gpu_count", "cpu", "memory", "label"]


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One requirement that fails: what is asked, what the worker has, and both as a clause for people."""

    kind: ReasonKind
    asked: str
    has: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The answer. When it fits, `gpus` are the UUIDs to give: of the smallest kind that does, by index."""

    fits: bool
    gpus: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()


def match(requirement: Requirement, capability: Capability) -> Fit:
    """Compare what is asked with what is there.

    GPUs of one task are of one kind, and a MIG slice serves single-GPU tasks alone (CUDA sees one slice a
    process). Memory is compared by the size on the box. Of several GPU mismatches only the first is told:
    name, memory, count.
    """
    chosen: tuple[str, ...] = ()
    reasons: list[Reason] = []
    if requirement.gpu_count:
        answer = _gpus(requirement, capability.gpus)
        if isinstance(answer, Reason):
            reasons.append(answer)
        else:
            chosen = answer
    reasons.extend(_host(requirement, capability))
    reasons.extend(_labels(requirement, capability))
    return Fit(fits=not reasons, gpus=() if reasons else chosen, reasons=tuple(reasons))


def _gpus(ask: Requirement, gpus: tuple[GpuCapability, ...]) -> tuple[str, ...] | Reason:
    if not gpus:
        return _reason("gpu_count", _count(ask.gpu_count), "none", "the worker has none")
    named = [gpu for gpu in gpus if name_matches(ask.gpu_names, gpu.names)]
    if not named:
        has = ", ".join(f"{count}x {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
        return _reason("gpu_name", " or ".join(ask.gpu_names), has, f"the worker has {has}")
    low, high = ask.vram_gb_min or 0, ask.vram_gb_max
    sized = [gpu for gpu in named if low <= gpu.vram_gb and (high is None or gpu.vram_gb <= high)]
    if not sized:
        return _vram_reason(ask, named)
    usable = [gpu for gpu in sized if ask.gpu_count == 1 or gpu.mig_parent_uuid is None]
    usable.sort(key=lambda gpu: (gpu.vram_gb, gpu.kind, gpu.index, gpu.uuid))
    groups = [list(group) for _, group in groupby(usable, key=lambda gpu: gpu.kind)]
    for group in groups:
        if len(group) >= ask.gpu_count:
            return tuple(gpu.uuid for gpu in group[: ask.gpu_count_max or ask.gpu_count])
    most = max((len(group) for group in groups), default=0)
    kind = " of one kind" if len(groups) > 1 else ""
    return _reason(
        "gpu_count",
        _count(ask.gpu_count),
        str(most),
        f"the worker has {most} such{kind}" if most else "the worker has MIG slices only",
    )


def _vram_reason(ask: Requirement, gpus: list[GpuCapability]) -> Reason:
    largest = max(gpus, key=lambda gpu: gpu.vram_gb)
    smallest = min(gpus, key=lambda gpu: gpu.vram_gb)
    if ask.vram_gb_min is not None and largest.vram_gb < ask.vram_gb_min:
        asked, nearest, which = f"{show_gb(ask.vram_gb_min)} per GPU", largest, "largest"
    elif ask.vram_gb_max is not None and smallest.vram_gb > ask.vram_gb_max:
        asked, nearest, which = f"at most {show_gb(ask.vram_gb_max)} per GPU", smallest, "smallest"
    else:
        asked = f"{show_gb(ask.vram_gb_min or 0)} to {show_gb(ask.vram_gb_max or 0)} per GPU"
        nearest, which = largest, "largest"
    has = show_gb(nearest.vram_gb)
    return _reason("vram", asked, has, f"the worker's {which} has {has} ({nearest.name})")


def _host(ask: Requirement, capability: Capability) -> Iterator[Reason]:
    if ask.cpu is not None and ask.cpu > capability.cpu_count:
        has = f"{capability.cpu_count:g}"
        yield _reason("cpu", f"{ask.cpu:g} CPUs", has, f"the worker has {has}")
    if ask.memory_mib is not None and ask.memory_mib > capability.memory_mib:
        has = show_mib(capability.memory_mib)
        yield _reason("memory", f"{show_mib(ask.memory_mib)} of memory", has, f"the worker has {has}")


def _labels(ask: Requirement, capability: Capability) -> Iterator[Reason]:
    labels = dict(capability.labels)
    for key, glob in ask.labels:
        value = labels.get(key)
        asked = f"label {key}={glob}" if glob else f"label {key}"
        if value is None:
            yield _reason("label", asked, "no such label", "the worker has no such label")
        elif glob and not fnmatchcase(value, glob):
            yield _reason("label", asked, f"{key}={value}", f"the worker has {key}={value}")


def _reason(kind: ReasonKind, asked: str, has: str, clause: str) -> Reason:
    return Reason(kind=kind, asked=asked, has=has, message=f"asks for {asked}, {clause}")


def _count(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
