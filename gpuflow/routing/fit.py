"""Does a task fit a worker, and if not, why? Pure and total: every pair has an answer, nothing is raised.

Used by the worker (with its free GPUs alone, to admit; with all of them, to subscribe), at submit and by
`explain`. How GPUs are chosen is in `gpuflow.routing.fit_gpus`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.fit_gpus import choose, share_of
from gpuflow.routing.reasons import Reason, ReasonKind, gap, reason
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.units import show_mib

__all__ = ["Fit", "Reason", "ReasonKind", "match", "nearness", "share_mib"]

#: Nearness of a worker that fits.
FITS: Final = 0.0


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
    name, memory, compute capability, count, room for a share.
    """
    chosen: tuple[str, ...] = ()
    reasons: list[Reason] = []
    if requirement.gpu_count:
        answer = choose(requirement, capability.gpus)
        if isinstance(answer, Reason):
            reasons.append(answer)
        else:
            chosen = answer
    reasons.extend(_host(requirement, capability))
    reasons.extend(_labels(requirement, capability))
    return Fit(fits=not reasons, gpus=() if reasons else chosen, reasons=tuple(reasons))


def nearness(fit: Fit) -> float:
    """Return how far a worker is from fitting, to order workers by: 0 fits, then the fewest failing requirements,
    and of these the smallest part of what is asked for that is missing.
    """
    if not fit.reasons:
        return FITS
    mean = sum(one.gap for one in fit.reasons) / len(fit.reasons)
    return len(fit.reasons) + 0.999 * mean


def share_mib(requirement: Requirement, gpu: GpuCapability) -> int | None:
    """Return how much of a GPU's memory a share takes, in MiB as the driver counts; None when it takes all.

    A GPU reports less than the size on its box, and shares are scaled alike: two of 12 GB fit a "24 GB" L4.
    """
    return share_of(requirement, gpu)


def _host(ask: Requirement, capability: Capability) -> Iterator[Reason]:
    if ask.cpu is not None and ask.cpu > capability.cpu_count:
        has = f"{capability.cpu_count:g}"
        missing = gap(ask.cpu, capability.cpu_count)
        yield reason("cpu", f"{ask.cpu:g} CPUs", has, f"the worker has {has}", missing)
    if ask.memory_mib is not None and ask.memory_mib > capability.memory_mib:
        has = show_mib(capability.memory_mib)
        missing = gap(ask.memory_mib, capability.memory_mib)
        yield reason("memory", f"{show_mib(ask.memory_mib)} of memory", has, f"the worker has {has}", missing)
    if capability.lacks_disk:
        floor, free = capability.disk_floor_mib, capability.disk_free_mib or 0
        asked = f"{show_mib(floor)} of free disk, which a worker keeps"
        yield reason("disk", asked, show_mib(free), f"the worker has {show_mib(free)} free", gap(floor, free))
    elif ask.disk_gib is not None:
        yield from _disk(ask.disk_gib * 1024, capability.disk_free_mib)


def _disk(asked_mib: float, free_mib: int | None) -> Iterator[Reason]:
    asked = f"{show_mib(round(asked_mib))} of free disk"
    if free_mib is None:
        yield reason("disk", asked, "unknown", "the worker does not tell how much it has")
    elif asked_mib > free_mib:
        has = show_mib(free_mib)
        yield reason("disk", asked, has, f"the worker has {has} free", gap(asked_mib, free_mib))


def _labels(ask: Requirement, capability: Capability) -> Iterator[Reason]:
    labels = dict(capability.labels)
    for key, glob in ask.labels:
        value = labels.get(key)
        asked = f"label {key}={glob}" if glob else f"label {key}"
        if value is None:
            yield reason("label", asked, "no such label", "the worker has no such label")
        elif glob and not fnmatchcase(value, glob):
            yield reason("label", asked, f"{key}={value}", f"the worker has {key}={value}")


def shared_mib(asked: Requirement, capability: Capability, gpus: tuple[str, ...]) -> int | None:
    """Return how many MiB of its one GPU a sharing task gets; None for whole GPUs."""
    if not asked.shares:
        return None
    return next(share_mib(asked, gpu) for gpu in capability.gpus if gpu.uuid in gpus)
