"""What this worker may take now: slots, CPUs, memory and GPUs. Decided at the pop, held by delivery tag, given back.

The transport asks `open_queues` and `choose` right before each pop; what was chosen is held until the pop has
answered. The supervisor `claim`s what its message holds, and calls `child_gone` and `release` when nothing of the child
is left. GPUs are taken from the machine (`slots.Gpus`), which binds all workers on it, before the message is: so a
worker never holds a message that cannot start.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from gpuflow.routing.capability import Capability
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.routing.fit import match
from gpuflow.routing.queues import is_demand_queue
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.demands import Demands
from gpuflow.worker.slots import CONTROL_SLOTS, Allocation, Gpus, Hold, Limits, SlotClass

#: So many demand queues are named in one pop at most.
MOST_CHOSEN: Final = 8


class Admission:
    """The gate of one worker (`broker.gate.Gate`)."""

    def __init__(self, demands: Demands, limits: Limits, gpus: Gpus) -> None:
        self.demands = demands
        self.limits = limits
        self.draining = False
        self._gpus = gpus
        self._held: dict[str, Allocation] = {}
        self._chosen: Hold | None = None
        self._lock = threading.RLock()

    @property
    def capability(self) -> Capability:
        """All that this worker has, free or not."""
        return self.demands.capability

    # -- the gate: called on the consumer's thread --------------------------------------------------------------

    @property
    def waits_as(self) -> str:
        """The class of this worker while it could take a job; "" otherwise."""
        with self._lock:
            return self.demands.name if self._takes_jobs() else ""

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return those of the control queue and the plain queues that a message may be taken from now."""
        with self._lock:
            return [queue for queue in queues if self._is_open(queue)]

    def fitting(self, ready: Sequence[str]) -> list[str]:
        """Return the demand queues of `ready` whose next message could start now."""
        if not ready or not self.waits_as:
            return []
        served = self.demands.served(ready)
        with self._lock:
            free = self._gpus.free(self.capability)
            return [queue for queue, requirement in served.items() if self._fits(requirement, free)]

    def choose(self, ready: Sequence[str]) -> list[str]:
        """Take the GPUs for the first queue that fits; return it, and others that what is held now would serve."""
        self.chosen_none()
        fitting = self.fitting(ready)
        with self._lock:
            for queue in fitting:
                asked = self._asked(queue)
                uuids = self._choose_gpus(asked)
                hold = self._gpus.take(uuids) if uuids else None
                if hold is not None or not asked.gpu_count:
                    self._chosen = hold
                    return [other for other in fitting if self._served_by(other, uuids)][:MOST_CHOSEN]
        return []

    def chosen_none(self) -> None:
        """Give back what `choose` has taken."""
        with self._lock:
            chosen, self._chosen = self._chosen, None
            if chosen is not None:
                self._gpus.release(chosen)

    def taken(self, queue: str, tag: str) -> None:
        """Hold a slot, and what the queue asks for, for the message of `tag`."""
        with self._lock:
            slot = self.slot_of(queue)
            allocation = Allocation(queue=queue, slot=slot)
            if slot == "job":
                allocation.requirement = self.demands.requirement(queue)
                if allocation.requirement is not None and allocation.requirement.gpu_count:
                    allocation.hold, self._chosen = self._chosen, None
                self.limits.jobs_taken += 1
            self._held[tag] = allocation
            self.chosen_none()

    def settled(self, tag: str) -> bool:
        """Give back what `tag` holds, or leave that to the supervisor that has claimed it; say if that opens a queue.

        What the end of a child opens is told by the supervisor.
        """
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is None:
                return False
            allocation.settled = True
            if allocation.claimed:
                return False
            opens = allocation.slot == "job" or not self._is_open(allocation.queue)
            self._let_go(allocation)
            del self._held[tag]
            return opens

    # -- the supervisor -----------------------------------------------------------------------------------------

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
                allocation.slot = "ending"
                self._let_go(allocation)

    def release(self, tag: str) -> None:
        """End a claim: nothing of the child is left."""
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is not None:
                allocation.claimed = False
                self._let_go(allocation)
                if allocation.settled:
                    del self._held[tag]

    # -- what others ask ----------------------------------------------------------------------------------------

    def slot_of(self, queue: str) -> SlotClass:
        """Return which kind of slot a message of `queue` takes; a demand queue is known by its name."""
        if queue == CONTROL_QUEUE:
            return "control"
        return "job" if is_demand_queue(queue) else "plain"

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
        """Return the UUIDs of the GPUs that could be taken now."""
        with self._lock:
            return tuple(gpu.uuid for gpu in self._gpus.free(self.capability).gpus)

    # -- inside -------------------------------------------------------------------------------------------------

    def _takes_jobs(self) -> bool:
        limits = self.limits
        if self.draining or (limits.one_job_only and limits.jobs_taken):
            return False
        return limits.max_jobs is None or self._count("job") < limits.max_jobs

    def _is_open(self, queue: str) -> bool:
        slot = self.slot_of(queue)
        if slot == "control":
            return self._count("control") < CONTROL_SLOTS
        return slot == "plain" and not self.draining and self._count("plain") < self.limits.threads

    def _fits(self, asked: Requirement, free: Capability) -> bool:
        limits, held = self.limits, [one for one in self._held.values() if one.slot == "job"]
        requirements = [one.requirement for one in held if one.requirement is not None]
        if (asked.cpu or 0) + sum(one.cpu or 0 for one in requirements) > self.capability.cpu_count:
            return False
        if (asked.memory_mib or 0) + sum(one.memory_mib or 0 for one in requirements) > self.capability.memory_mib:
            return False
        if asked.gpu_count == 0:
            return limits.max_jobs is not None or sum(1 for one in held if not one.gpus) < limits.cpu_jobs
        return match(asked, free).fits

    def _asked(self, queue: str) -> Requirement:
        return self.demands.requirement(queue) or Requirement()

    def _choose_gpus(self, asked: Requirement) -> tuple[str, ...]:
        return match(asked, self._gpus.free(self.capability)).gpus if asked.gpu_count else ()

    def _served_by(self, queue: str, uuids: tuple[str, ...]) -> bool:
        """Whether a message of `queue` could use exactly the GPUs that are held now, or needs none."""
        asked = self._asked(queue)
        return not asked.gpu_count or set(match(asked, self.capability.only(uuids)).gpus) == set(uuids)

    def _let_go(self, allocation: Allocation) -> None:
        hold, allocation.hold = allocation.hold, None
        if hold is not None:
            self._gpus.release(hold)

    def _count(self, slot: SlotClass) -> int:
        return sum(1 for held in self._held.values() if held.slot == slot)
