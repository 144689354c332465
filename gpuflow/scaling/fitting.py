"""Which worker serves which queue, and how many of its tasks at once. Pure; by the match that workers use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from gpuflow.routing.capability import Capability
from gpuflow.routing.fit import match
from gpuflow.routing.queue_names import family_matches
from gpuflow.routing.requirement import Requirement
from gpuflow.scaling.model import Demand, Family, WorkerFacts

#: A worker without --max-jobs runs one task without GPUs for so many CPUs (worker/bootsteps.py).
CPUS_PER_JOB: Final = 4
#: Plain Celery tasks run in threads: so many at once are counted for a worker.
PLAIN_SLOTS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker that takes work, or will: one that is there, or a machine that is coming."""

    id: str
    capability: Capability
    families: tuple[str, ...] | None = None
    #: None: every plain queue, as far as is known.
    plain_queues: tuple[str, ...] | None = None
    most_jobs: int | None = None
    coming: bool = False
    #: So many messages are held there.
    held: int = 0
    #: What was asked of it before: one round asks the same again and again.
    _slots: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_worker(cls, worker: WorkerFacts) -> Place:
        """Return the place of a worker."""
        return cls(
            id=worker.id,
            capability=worker.capability,
            families=worker.families,
            plain_queues=worker.plain_queues,
            most_jobs=worker.most_jobs,
            held=worker.leases,
        )

    @classmethod
    def of_family(cls, family: Family, number: object) -> Place:
        """Return the place of a machine of this family that is coming."""
        return cls(
            id=f"{family.name}#{number}",
            capability=family.capability,
            families=family.families,
            plain_queues=family.plain_queues,
            most_jobs=family.slots,
            coming=True,
        )

    def serves(self, demand: Demand) -> bool:
        """Whether messages of a queue may be taken there."""
        return self.slots(demand) > 0

    def slots(self, demand: Demand) -> int:
        """Return how many tasks of a queue run there at once, 0 where it is not served."""
        if demand.queue not in self._slots:
            self._slots[demand.queue] = self._slots_of(demand) if self._may_serve(demand) else 0
        return self._slots[demand.queue]

    def _may_serve(self, demand: Demand) -> bool:
        if demand.requirement is None:
            return self.plain_queues is None or demand.queue in self.plain_queues
        covered = self.families is None or any(family_matches(demand.queue, family) for family in self.families)
        return covered and fits(demand.requirement, self.capability)

    def _slots_of(self, demand: Demand) -> int:
        if demand.requirement is None:
            return PLAIN_SLOTS
        most = places(demand.requirement, self.capability)
        return most if self.most_jobs is None else min(most, self.most_jobs)


@lru_cache(maxsize=16_384)
def fits(asked: Requirement, capability: Capability) -> bool:
    """Whether a machine satisfies a requirement."""
    return match(asked, capability).fits


@lru_cache(maxsize=16_384)
def places(asked: Requirement, capability: Capability) -> int:
    """Return how many tasks of a requirement that fits have place on an empty machine; at least 1."""
    if not asked.gpu_count:
        return max(1, int(capability.cpu_count // (asked.cpu or CPUS_PER_JOB)))
    count, left = 0, capability
    while (fit := match(asked, left)).fits:
        count += 1
        left = left.only({gpu.uuid for gpu in left.gpus}.difference(fit.gpus))
    return max(1, count)


def worth(capability: Capability) -> tuple[float, float]:
    """Sort key: the smaller machine first."""
    return (sum(gpu.vram_gb for gpu in capability.gpus), capability.cpu_count)


def shortfalls(
    demands: Sequence[tuple[Demand, int]], at: Sequence[Place], *, beside_held: bool = False
) -> dict[str, int]:
    """Return how many slots each queue lacks; `demands` come in order of urgency, each with the slots that it needs.

    A slot that one queue needs is not there for the next: those are used first that fewest queues could use.
    `beside_held`: what a place holds already takes a slot for each message.
    """
    left = {place.id: 1.0 for place in at}
    order = sorted(at, key=lambda place: (place.coming, worth(place.capability), place.id))
    missing: dict[str, int] = {}
    for demand, count in demands:
        needed = count
        for place in order:
            if needed <= 0:
                break
            if left[place.id] <= 0 or not place.serves(demand):
                continue
            slots = place.slots(demand)
            held = place.held if beside_held else 0
            used = min(needed, max(0, int(slots * left[place.id] + 1e-9) - held))
            needed -= used
            left[place.id] -= used / slots
        missing[demand.queue] = max(0, needed)
    return missing
