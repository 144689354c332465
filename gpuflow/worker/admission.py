"""What this worker may take now: slots, CPUs, memory and GPUs. Decided at the pop, held by delivery tag, given back.

The transport asks `open_queues` and `choose` right before each pop; what was chosen is held until the pop has
answered. The supervisor `claim`s what its message holds, and calls `child_gone` and `release` when nothing of the child
is left. GPUs are taken from the machine (`MachineGpus`), which binds all workers on it, before the message is: so a
worker never holds a message that cannot start.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from gpuflow.broker.gate import ANY_TIME, Choice, Taste
from gpuflow.fleet.gpu_locks import Hold
from gpuflow.routing.capability import Capability
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.routing.fit import match, shared_mib
from gpuflow.routing.queues import is_demand_queue
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.demands import Demands
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.offering import Offering
from gpuflow.worker.recent_models import RecentModels
from gpuflow.worker.reserving import Reserving, Room
from gpuflow.worker.slots import CONTROL_SLOTS, Allocation, Limits, SlotClass

#: So many demand queues are named in one pop at most.
MOST_CHOSEN: Final = 8


class Admission:
    """The gate of one worker (`broker.gate.Gate`)."""

    def __init__(
        self,
        demands: Demands,
        limits: Limits,
        gpus: MachineGpus,
        reserving: Reserving,
        *,
        offering: Offering | None = None,
        patience_seconds: float = 0.0,
    ) -> None:
        self.demands = demands
        self.limits = limits
        self.reserving = reserving
        self.models = RecentModels()
        self.draining = False
        self._offering = offering
        self._patience_seconds = patience_seconds
        self._gpus = gpus
        self._held: dict[str, Allocation] = {}
        self._chosen: Hold | None = None
        self._machine = gpus.group()
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

    @property
    def machine(self) -> str:
        """The group of the workers that share the GPUs of this machine; "" without GPUs."""
        return self._machine

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return those of the control queue and the plain queues that a message may be taken from now."""
        with self._lock:
            return [queue for queue in queues if self._is_open(queue)]

    @property
    def taste(self) -> Taste:
        """Which messages of a queue this worker takes first, and which not at all."""
        offers = self._offering
        return Taste(
            types=None if offers is None else tuple(offers.plain.names),
            gpu_types=None if offers is None or offers.same else tuple(offers.with_gpus.names),
            models=self.models.names(),
            patience_seconds=self._patience_seconds,
        )

    def woken_for(self, queue: str) -> None:
        """Say of a queue of which the doorbell told whether this class serves it."""
        self.demands.tell(queue)

    def fitting(self, ready: Sequence[str], barren: Collection[str] = ()) -> list[str]:
        """Return the demand queues of `ready`, without the barren ones, whose next message could start now."""
        served = self._served(ready, barren)
        with self._lock:
            return [queue for queue, _ in self._rooms(served, ready)]

    def choose(self, ready: Sequence[str], barren: Collection[str] = ()) -> list[Choice]:
        """Take the GPUs for the first queue that fits; return it, and others that what is held now would serve.

        What stands behind the last that is chosen is not looked at, unless a task there may need a reservation.
        """
        self.chosen_none()
        served = self._served(ready, barren)
        chosen: list[Choice] = []
        waiting: list[tuple[str, Room]] = []
        first: tuple[Requirement, tuple[str, ...]] | None = None
        with self._lock:
            for queue, room in self._rooms(served, ready):
                waiting.append((queue, room))
                first = first or self._hold_for(self._asked(queue), room)
                if first is None:
                    continue
                chosen += [self._choice(name, its) for name, its in waiting if self._served_by(name, its, *first)]
                waiting.clear()
                if len(chosen) >= MOST_CHOSEN and (first[1] or not self.capability.gpus):
                    break
        return chosen[:MOST_CHOSEN]

    def _hold_for(self, asked: Requirement, room: Room) -> tuple[Requirement, tuple[str, ...]] | None:
        """Take the GPUs for a task; return its ask with them, None when they cannot be had."""
        gpus = match(asked, room.capability).gpus if asked.gpu_count else ()
        hold = self._gpus.take(gpus, shared_mib(asked, room.capability, gpus)) if gpus else None
        if hold is None and asked.gpu_count:
            return None
        self._chosen = hold
        return asked, gpus

    def chosen_none(self) -> None:
        """Give back what `choose` has taken."""
        with self._lock:
            chosen, self._chosen = self._chosen, None
            if chosen is not None:
                self._gpus.release(chosen, wait_seconds=0)

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
                self.reserving.taken(queue)
            self._held[tag] = allocation
            self.chosen_none()
        if slot == "job":
            self.demands.tell(queue)

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
            del self._held[tag]
        self._let_go(allocation)
        return opens

    # -- the supervisor -----------------------------------------------------------------------------------------

    def claim(self, tag: str, limit_seconds: float | None = None) -> Allocation | None:
        """Return what `tag` holds, and keep it until `release` even if the message is settled before.

        `limit_seconds` is the time limit of the attempt that begins now: the whole machine may plan with it.
        """
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is not None:
                allocation.claimed = True
                if allocation.hold is not None and limit_seconds is not None:
                    self._gpus.note_end(allocation.hold, limit_seconds)
            return allocation

    def child_gone(self, tag: str) -> None:
        """Free the slot and the GPUs of a job whose child has gone, before its result is committed."""
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is None or allocation.slot != "job":
                return
            allocation.slot = "ending"
        self._let_go(allocation)

    def release(self, tag: str) -> None:
        """End a claim: nothing of the child is left."""
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is None:
                return
            allocation.claimed = False
            if allocation.settled:
                del self._held[tag]
        self._let_go(allocation)

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

    def free_jobs(self) -> int | None:
        """Return how many more jobs could begin, None for no limit."""
        with self._lock:
            return None if self.limits.max_jobs is None else max(0, self.limits.max_jobs - self._count("job"))

    def tags_on(self, uuid: str) -> list[str]:
        """Return the delivery tags of the jobs that hold a GPU."""
        with self._lock:
            return [tag for tag, held in self._held.items() if uuid in held.gpus]

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
        """Return the UUIDs of the GPUs that could be taken now, by any worker of the machine."""
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

    def _served(self, ready: Sequence[str], barren: Collection[str]) -> Mapping[str, Requirement]:
        """Return what this worker serves of `ready`, in order, while it takes jobs; looks at the reservation too."""
        if not ready or not self.waits_as:
            return {}
        self.reserving.look(ready)
        return self.demands.served(name for name in ready if name not in barren)

    def _rooms(self, served: Mapping[str, Requirement], ready: Sequence[str]) -> Iterator[tuple[str, Room]]:
        """Yield the queues whose next message could start now, each with what it may use. Needs the lock."""
        if not served:
            return
        offers = {sized: self._gpus.free(self.capability, asks_memory=sized) for sized in (True, False)}
        uses_gpus = False
        for queue, asked in served.items():
            free = self._free(asked, offers)
            room = self._room(queue, asked, ready, free)
            if room is not None:
                uses_gpus = uses_gpus or asked.gpu_count > 0
                yield queue, room
            elif self._may_starve(asked) and not uses_gpus:
                self.reserving.claim(queue, asked, self.capability, free, ready)

    def _free(self, asked: Requirement, offers: Mapping[bool, Capability]) -> Capability:
        """Return this worker with the GPUs that could be given to such a task now."""
        if not asked.gpu_count:
            return self.capability
        if asked.shares:
            return self.capability.with_room(self._gpus.room(self.capability))
        return offers[asked.vram_gb_min is not None]

    def _room(self, queue: str, asked: Requirement, ready: Sequence[str], free: Capability) -> Room | None:
        """Return what the next task of a queue may use of `free`, None when it cannot start now."""
        if not self._host_fits(asked):
            return None
        kept = self.reserving.kept_from(queue, ready)
        beside = kept is None or self._host_fits(asked, beside=self._asked(kept))
        for room in self.reserving.room(queue, ready, free):
            if (beside or room.most_seconds != ANY_TIME) and match(asked, room.capability).fits:
                return room
        return None

    def _may_starve(self, asked: Requirement) -> bool:
        """Whether smaller tasks could keep one from its GPUs for ever: for several, or for one that is shared now."""
        return asked.gpu_count > 1 or (not asked.shares and self._gpus.shared())

    def _host_fits(self, asked: Requirement, beside: Requirement | None = None) -> bool:
        """Whether CPUs, memory and slots are there, GPUs apart; with `beside`, also when that task has begun too."""
        held = [one for one in self._held.values() if one.slot == "job"]
        asks = [one.requirement for one in held if one.requirement is not None] + ([beside] if beside else [])
        if asked.cpu and asked.cpu + sum(one.cpu or 0 for one in asks) > self.capability.cpu_count:
            return False
        memory_mib = sum(one.memory_mib or 0 for one in asks)
        if asked.memory_mib and asked.memory_mib + memory_mib > self.capability.memory_mib:
            return False
        limits = self.limits
        if asked.gpu_count or asked.cpu or limits.max_jobs is not None:
            return True
        unsaid = [one for one in held if not one.gpus and not (one.requirement and one.requirement.cpu)]
        return len(unsaid) < limits.cpu_jobs

    def _choice(self, queue: str, room: Room) -> Choice:
        with_gpus = self._asked(queue).gpu_count > 0
        return Choice(queue=queue, most_seconds=room.most_seconds, with_gpus=with_gpus)

    def _asked(self, queue: str) -> Requirement:
        return self.demands.requirement(queue) or Requirement()

    def _served_by(self, queue: str, room: Room, first: Requirement, gpus: tuple[str, ...]) -> bool:
        """Whether a message of `queue` could use exactly the GPUs that are held for `first`, or needs none."""
        asked = self._asked(queue)
        if not asked.gpu_count:
            return True
        if asked.shares or first.shares:
            return asked == first
        fit = match(asked, room.capability.only(gpus))
        return fit.fits and set(fit.gpus) == set(gpus)

    def _let_go(self, allocation: Allocation) -> None:
        """Give the GPUs back; it may take some seconds until nothing is left on them, so not under the lock."""
        with self._lock:
            hold, allocation.hold = allocation.hold, None
        if hold is not None:
            self._gpus.release(hold)

    def _count(self, slot: SlotClass) -> int:
        return sum(1 for held in self._held.values() if held.slot == slot)
