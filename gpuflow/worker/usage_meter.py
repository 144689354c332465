"""Measures what one attempt uses: GPU-seconds, energy and cost, from when it has its GPUs until its child has ended.

A whole GPU counts its seconds; a share of a GPU its part of the memory. Requests of a warm session divide its GPUs
among those that it answers at the time, as it was at the begin and at the end of the request. The energy is what the
driver counts for whole GPUs; of a share, a MIG slice, or a driver that tells none, it is unknown and counts as 0. The
cost is the worker's rate times the part of the machine: of its GPUs, or, for a task without GPUs, of its CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpuflow.fleet.gpu_energy import EnergyReader
from gpuflow.fleet.gpu_locks import Hold
from gpuflow.ledger.records import Usage
from gpuflow.routing.capability import Capability
from gpuflow.worker.admission import Admission
from gpuflow.worker.slots import Allocation

#: The driver of this machine, for all attempts.
_DRIVER: Final = EnergyReader()


class UsageMeter:
    """Measures one attempt from its construction on; `stop` ends it.

    `cpus` is what a task without GPUs holds. `sharers` tells how many requests use the GPUs now (1: a child of
    its own). `cost_per_hour` is that of the whole machine.
    """

    def __init__(
        self,
        capability: Capability,
        hold: Hold,
        *,
        cpus: float,
        cost_per_hour: float,
        sharers: Callable[[], int] = lambda: 1,
        energy: EnergyReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capability = capability
        self._hold = hold
        self._cpus = cpus
        self._cost_per_hour = cost_per_hour
        self._sharers = sharers
        self._clock = clock
        self._energy = energy or _DRIVER
        self._began_at = clock()
        self._shared_by = max(1, sharers())
        self._before = self._joules()
        self._usage: Usage | None = None

    def stop(self) -> Usage:
        """Return what was used until now; the first call counts."""
        if self._usage is None:
            self._usage = self._measured()
        return self._usage

    def with_artifacts(self, size: int) -> Usage:
        """Return what was used, with the bytes of the artifacts."""
        return replace(self.stop(), artifact_bytes=size)

    def _measured(self) -> Usage:
        seconds = max(0.0, self._clock() - self._began_at)
        part = 2 / (self._shared_by + max(1, self._sharers()))
        gpus = self._gpus() * part
        return Usage(
            seconds=seconds,
            gpu_seconds=gpus * seconds,
            energy_joules=energy_between(self._before, self._joules()) if part == 1 else 0.0,
            cost=self._cost_per_hour * self._part_of_machine(gpus) * seconds / 3600,
        )

    def _gpus(self) -> float:
        """Return how many GPUs are held, a share by its part of the memory."""
        share = self._hold.share_mib
        if share is None:
            return float(len(self._hold.uuids))
        sizes = {gpu.uuid: gpu.total_mib for gpu in self._capability.gpus}
        return sum(min(1.0, share / sizes[uuid]) if sizes.get(uuid) else 1.0 for uuid in self._hold.uuids)

    def _part_of_machine(self, gpus: float) -> float:
        if self._hold.uuids:
            return min(1.0, gpus / max(1, len(self._capability.gpus)))
        return min(1.0, self._cpus / self._capability.cpu_count) if self._capability.cpu_count else 1.0

    def _joules(self) -> Mapping[str, float]:
        whole: Sequence[str] = self._hold.uuids if self._hold.share_mib is None and self._shared_by == 1 else ()
        return self._energy.read(whole)


def meter_of(admission: Admission, tag: str, hold: Hold, allocation: Allocation | None) -> UsageMeter:
    """Begin to measure the attempt that a message has begun with what it holds."""
    sessions = admission.sessions if allocation is not None and allocation.session else None
    asked = allocation.requirement if allocation is not None else None
    return UsageMeter(
        admission.capability,
        hold,
        cpus=(asked.cpu if asked is not None else None) or admission.capability.cpu_count / admission.limits.cpu_jobs,
        cost_per_hour=admission.matcher.cost,
        sharers=(lambda: 1) if sessions is None else (lambda: sessions.sharers(tag)),
    )


def energy_between(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the joules between two readings of GPUs; one that was reset in between, or lost, counts as 0."""
    return sum(max(0.0, after[uuid] - joules) for uuid, joules in before.items() if uuid in after)
