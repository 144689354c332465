"""What this worker may take now: slots and GPUs. Decided at the pop, held by delivery tag, given back at the end.

The transport asks `open_queues` right before each pop; the supervisor asks `allocation` when it starts a child and
calls `release` when nothing of the child is left. First form: GPUs of this process only, all-or-nothing; the lock
files that bind several workers of one machine come on top of `take`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from gpuflow.routing.capability import Capability
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.routing.fit import match
from gpuflow.routing.queues import is_demand_queue
from gpuflow.routing.requirement import Requirement

#: Control tasks (joins, dispatch) that may run at once, beside all other work.
CONTROL_SLOTS: Final = 4

#: `ending`: the child of a job has gone and its result is being committed; it holds no slot and no GPU any more.
SlotClass = Literal["control", "plain", "job", "ending"]


@dataclass(kw_only=True)
class Allocation:
    """What one leased message holds: a slot, and the GPUs (UUIDs) it got."""

    queue: str
    slot: SlotClass
    gpus: tuple[str, ...] = ()
    claimed: bool = False
    settled: bool = False


@dataclass(kw_only=True)
class Limits:
    """How much this worker takes at once. `max_jobs` None: as many children as fit its GPUs and CPUs."""

    threads: int = 64
    max_jobs: int | None = None
    cpu_jobs: int = 1
    one_job_only: bool = False
    jobs_taken: int = field(default=0)


class Admission:
    """The gate of one worker (`broker.leases.Gate`)."""

    def __init__(self, capability: Capability, limits: Limits) -> None:
        self.capability = capability
        self.limits = limits
        self.draining = False
        self._requirements: Mapping[str, Requirement] = {}
        self._held: dict[str, Allocation] = {}
        self._lock = threading.Lock()

    def serve(self, requirements: Mapping[str, Requirement]) -> None:
        """Set the demand queues that this worker serves, with what each asks for."""
        with self._lock:
            self._requirements = dict(requirements)

    def slot_of(self, queue: str) -> SlotClass:
        """Return which kind of slot a message of `queue` takes; a demand queue is known by its name."""
        if queue == CONTROL_QUEUE:
            return "control"
        return "job" if is_demand_queue(queue) else "plain"

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return those of `queues` whose next message could start now."""
        with self._lock:
            return [queue for queue in queues if self._fits_now(queue)]

    def taken(self, queue: str, tag: str) -> None:
        """Hold a slot, and the GPUs that the queue asks for, for the message of `tag`."""
        with self._lock:
            slot = self.slot_of(queue)
            gpus: tuple[str, ...] = ()
            if slot == "job":
                requirement = self._requirements.get(queue)
                gpus = (self._choose(requirement) if requirement is not None else None) or ()
                self.limits.jobs_taken += 1
            self._held[tag] = Allocation(queue=queue, slot=slot, gpus=gpus)

    def settled(self, tag: str) -> None:
        """Give back what `tag` holds, or leave that to the supervisor that has claimed it."""
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is None:
                return
            allocation.settled = True
            if not allocation.claimed:
                del self._held[tag]

    def claim(self, tag: str) -> Allocation | None:
        """Return what `tag` holds, and keep it until `release` even if the message is settled before."""
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is not None:
                allocation.claimed = True
            return allocation

    def child_gone(self, tag: str) -> None:
        """Free the slot and the GPUs of a job whose child has gone, before its result is committed."""
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is not None and allocation.slot == "job":
                allocation.slot, allocation.gpus = "ending", ()

    def release(self, tag: str) -> None:
        """End a claim: nothing of the child is left."""
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is not None:
                allocation.claimed = False
                if allocation.settled:
                    del self._held[tag]
                else:
                    allocation.gpus = ()

    def jobs(self) -> int:
        """Return how many jobs are held now."""
        with self._lock:
            return self._count("job")

    def idle(self) -> bool:
        """Whether nothing but control tasks is held."""
        with self._lock:
            return all(held.slot == "control" for held in self._held.values())

    def has_had_its_job(self) -> bool:
        """Whether a worker for one job has had it, to the end."""
        with self._lock:
            return (
                self.limits.one_job_only
                and self.limits.jobs_taken > 0
                and not any(held.slot in ("job", "ending") for held in self._held.values())
            )

    def free_gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that nothing holds."""
        with self._lock:
            return self._free()

    def _fits_now(self, queue: str) -> bool:
        slot = self.slot_of(queue)
        if slot == "control":
            return self._count("control") < CONTROL_SLOTS
        if self.draining:
            return False
        if slot == "plain":
            return self._count("plain") < self.limits.threads
        requirement = self._requirements.get(queue)
        return requirement is not None and self._job_fits(requirement)

    def _job_fits(self, requirement: Requirement) -> bool:
        limits = self.limits
        if limits.one_job_only and limits.jobs_taken:
            return False
        jobs = self._count("job")
        if limits.max_jobs is not None and jobs >= limits.max_jobs:
            return False
        if requirement.gpu_count == 0:
            on_cpu = sum(1 for held in self._held.values() if held.slot == "job" and not held.gpus)
            return limits.max_jobs is not None or on_cpu < limits.cpu_jobs
        return self._choose(requirement) is not None

    def _choose(self, requirement: Requirement) -> tuple[str, ...] | None:
        """Return the first free GPUs that satisfy the requirement together, or None."""
        if requirement.gpu_count == 0:
            return ()
        fit = match(requirement, self.capability.only(self._free()))
        return fit.gpus if fit.fits else None

    def _free(self) -> tuple[str, ...]:
        busy = {uuid for held in self._held.values() for uuid in held.gpus}
        return tuple(gpu.uuid for gpu in self.capability.gpus if gpu.uuid not in busy)

    def _count(self, slot: SlotClass) -> int:
        return sum(1 for held in self._held.values() if held.slot == slot)
