"""What this worker may take now: slots, CPUs, memory and GPUs. Decided at the pop, held by delivery tag, given back.

The transport asks `open_queues` and `choose` right before each pop; what was chosen is held until the pop has
answered. The supervisor `keep`s what its message holds, and calls `child_gone` and `release` when nothing of the child
is left. GPUs are taken from the machine (`MachineGpus`), which binds all workers on it, before the message is: so a
worker never holds a message that cannot start.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from gpuflow.broker.gate import ANY_TIME, MessageFilter, SelectedQueue
from gpuflow.fleet.gpu_locks import Hold
from gpuflow.routing.capability import Capability
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES
from gpuflow.routing.fit import match, shared_mib
from gpuflow.routing.offers import WARM_TASK_TYPES, is_replica, task_type_of
from gpuflow.routing.placement import HostUsage, Placement
from gpuflow.routing.queue_names import is_demand_queue
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.placements import Placements
from gpuflow.worker.queue_matcher import QueueMatcher
from gpuflow.worker.recent_models import RecentModels
from gpuflow.worker.reserving import Reserving
from gpuflow.worker.resource_usage import ResourceUsage
from gpuflow.worker.sessions.entry import LOADING_PLACES
from gpuflow.worker.sessions.neighbours import Neighbours
from gpuflow.worker.sessions.table import Sessions
from gpuflow.worker.slots import Allocation, Limits, SlotClass
from gpuflow.worker.supported_runtimes import SupportedRuntimes

#: So many demand queues are named in one pop at most.
MOST_CHOSEN: Final = 8


class Admission:
    """The gate of one worker (`broker.gate.Gate`)."""

    def __init__(
        self,
        matcher: QueueMatcher,
        limits: Limits,
        gpus: MachineGpus,
        reserving: Reserving,
        *,
        supported_runtimes: SupportedRuntimes | None = None,
        patience_seconds: float = 0.0,
        sessions: Sessions | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.matcher = matcher
        self.limits = limits
        self.reserving = reserving
        self.models = RecentModels()
        self.draining = False
        #: False: it takes nothing new but control tasks and notices, and keeps no model loaded that idles.
        self.enabled = True
        self._supported_runtimes = supported_runtimes
        self._patience_seconds = patience_seconds
        self._gpus = gpus
        self.sessions = sessions
        self._neighbours = neighbours
        self._resources = ResourceUsage(limits=limits, sessions=sessions)
        self._held = self._resources.held
        self._placements = Placements(matcher, gpus, reserving, self._resources)
        self._chosen: Hold | None = None
        self._warm_only: set[str] = set()
        self._machine = gpus.group()
        self._lock = threading.RLock()

    @property
    def capability(self) -> Capability:
        """All that this worker has, free or not."""
        return self.matcher.capability

    # -- the gate: called on the consumer's thread --------------------------------------------------------------

    #: Room is counted here, and for each queue by itself.
    counts_prefetch = False

    @property
    def waits_as(self) -> str:
        """The class of this worker while it could take a job, or a request to a warm session; "" otherwise."""
        with self._lock:
            return self.matcher.name if self._takes_jobs() or self._warm_names() else ""

    @property
    def machine(self) -> str:
        """The group of the workers that share the GPUs of this machine; "" without GPUs."""
        return self._machine

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """Return those of the control queue and the plain queues that a message may be taken from now."""
        with self._lock:
            return [queue for queue in queues if self._is_open(queue)]

    @property
    def message_filter(self) -> MessageFilter:
        """Which messages of a queue this worker takes first, and which not at all."""
        offers = self._supported_runtimes
        return MessageFilter(
            types=None if offers is None else tuple(offers.plain.names),
            gpu_types=None if offers is None or offers.same else tuple(offers.with_gpus.names),
            secrets=None if offers is None else offers.secrets,
            models=self.models.names(),
            sessions=self._warm_names(),
            full=self.sessions.full() if self.sessions is not None else (),
            here=self.sessions.here() if self.sessions is not None else (),
            kept=self.sessions.kept() if self.sessions is not None else {},
            patience_seconds=self._patience_seconds,
        )

    def woken_for(self, queue: str) -> None:
        """Say of a queue of which the doorbell told whether this class serves it."""
        self.matcher.tell(queue)

    def fitting(self, ready: Sequence[str], barren: Collection[str] = ()) -> list[str]:
        """Return the demand queues of `ready`, without the barren ones, whose next message could start now."""
        served = self._served(ready, barren)
        with self._lock:
            return [queue for queue, _ in self._startable(served)]

    def choose(
        self, ready: Sequence[str], barren: Collection[str] = (), full: Collection[str] = ()
    ) -> list[SelectedQueue]:
        """Take the GPUs for the first queue that fits; return it, and others that what is held now would serve.

        What stands behind the last that is chosen is not looked at, unless a task there may need a reservation. Those
        that are `full` are not chosen for the warm sessions alone.
        """
        self.chosen_none()
        served = self._served(ready, barren)
        chosen: list[SelectedQueue] = []
        waiting: list[tuple[str, Placement]] = []
        first: tuple[Requirement, tuple[str, ...]] | None = None
        with self._lock:
            for queue, placement in self._startable(served):
                waiting.append((queue, placement))
                first = first or self._hold_for(self._placements.asked(queue), placement)
                if first is None:
                    continue
                chosen += [
                    self._selection(name, its) for name, its in waiting if self._placements.serves(name, its, *first)
                ]
                waiting.clear()
                if len(chosen) >= MOST_CHOSEN and (first[1] or not self.capability.gpus):
                    break
            chosen = chosen[:MOST_CHOSEN]
            passed = {*full, *(choice.queue for choice in chosen)}
            rest = [queue for queue in served if queue not in passed]
            warm = self._placements.warm_only(rest, most=MOST_CHOSEN - len(chosen), beyond=self._neighbours is not None)
            self._warm_only = {choice.queue for choice in warm}
            return chosen + warm

    def on_blocked_by_sessions(self, queue: str) -> None:
        """Close sessions that idle, as many as must go for the next task of a queue; it begins when they are gone.

        Where that does not help, other workers of the machine are asked to close theirs.
        """
        asked = self.matcher.requirement(queue)
        if asked is None or not self._takes_jobs() or self.make_room(asked, f"a task of {queue} waits for its place"):
            return
        if self._neighbours is not None and asked.gpu_count:
            self._neighbours.wish(asked)

    def make_room(self, asked: Requirement, why: str) -> bool:
        """Close sessions that idle until this would fit; say whether it will."""
        with self._lock:
            return self._placements.evict_for(asked, why)

    def _hold_for(self, asked: Requirement, placement: Placement) -> tuple[Requirement, tuple[str, ...]] | None:
        """Take the GPUs for a task; return its ask with them, None when they cannot be had."""
        gpus = match(asked, placement.capability).gpus if asked.gpu_count else ()
        hold = self._gpus.claim(gpus, shared_mib(asked, placement.capability, gpus)) if gpus else None
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

    def on_leased(self, queue: str, tag: str, session: str = "", asked: str = "") -> bool:
        """Hold a place in a warm session for the message of `tag`, or a slot and what its queue asks for.

        False when there is neither: the session that could have answered it has ended since the queue was chosen.
        """
        with self._lock:
            slot = self.slot_of(queue)
            allocation = Allocation(queue=queue, slot=slot)
            if slot == "job" and not self._place(queue, tag, allocation, session, asked):
                self.chosen_none()
                return False
            self._held[tag] = allocation
            self.chosen_none()
        if slot == "job":
            self.matcher.tell(queue)
            if self._neighbours is not None:
                self._neighbours.granted()
        return True

    def _place(self, queue: str, tag: str, allocation: Allocation, session: str, asked: str) -> bool:
        """Give the message of a demand queue its place; False where it has none."""
        requirement = self.matcher.requirement(queue)
        needs_gpus = requirement is not None and requirement.gpu_count > 0
        sessions = self.sessions if session and self._keeps_warm(asked, gpus=needs_gpus) else None
        replica = is_replica(asked)
        if sessions is not None and sessions.join(session, tag, replica=replica):
            allocation.slot, allocation.session = "replica" if replica else "request", session
            return True
        if queue in self._warm_only or (needs_gpus and self._chosen is None):
            return False
        hold: Hold | None = None
        if needs_gpus:
            hold, self._chosen = self._chosen, None
        if sessions is not None:
            allocation.slot, allocation.session = "replica" if replica else "request", session
            in_turn = task_type_of(asked) in WARM_TASK_TYPES
            places = (
                self._supported_runtimes.loading_places(asked)
                if self._supported_runtimes is not None
                else LOADING_PLACES
            )
            sessions.expect(session, tag, hold, requirement, in_turn=in_turn, loading_places=places, replica=replica)
        else:
            allocation.requirement, allocation.hold = requirement, hold
        self.limits.jobs_taken += 1
        self.reserving.task_began(queue)
        return True

    def _keeps_warm(self, asked: str, *, gpus: bool) -> bool:
        return self._supported_runtimes is None or self._supported_runtimes.keeps_warm(asked, gpus=gpus)

    def on_lease_ended(self, tag: str) -> bool:
        """Give back what `tag` holds, or leave that to the supervisor that keeps it; say if that opens a queue.

        What the end of a child opens is told by the supervisor.
        """
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is None:
                return False
            allocation.lease_ended = True
            if allocation.kept:
                return False
            gone = allocation.slot == "ending"
            opens = not gone and (
                allocation.slot in ("job", "request", "replica") or not self._is_open(allocation.queue)
            )
            del self._held[tag]
        self._let_go(tag, allocation)
        return opens

    # -- the supervisor -----------------------------------------------------------------------------------------

    def keep(self, tag: str, limit_seconds: float | None = None) -> Allocation | None:
        """Return what `tag` holds, and keep it until `release` even if its lease ends before.

        `limit_seconds` is the time limit of the attempt that begins now: the whole machine may plan with it.
        """
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is not None:
                allocation.kept = True
                if allocation.hold is not None and limit_seconds is not None:
                    self._gpus.note_end(allocation.hold, limit_seconds)
            return allocation

    def child_gone(self, tag: str) -> None:
        """Free the slot and the GPUs of a job whose child has gone, before its result is committed.

        The caller wakes the consumers of the machine.
        """
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is None or allocation.slot not in ("job", "request", "replica"):
                return
            allocation.slot = "ending"
        self._let_go(tag, allocation, quietly=True)

    def release(self, tag: str) -> None:
        """End what was kept: nothing of the child is left."""
        with self._lock:
            allocation = self._held.get(tag)
            if allocation is None:
                return
            allocation.kept = False
            if allocation.lease_ended:
                del self._held[tag]
        self._let_go(tag, allocation)

    # -- what others ask ----------------------------------------------------------------------------------------

    def slot_of(self, queue: str) -> SlotClass:
        """Return which kind of slot a message of `queue` takes; a demand queue is known by its name."""
        if queue == CONTROL_QUEUE:
            return "control"
        if queue in NOTICE_QUEUES:
            return "notice"
        return "job" if is_demand_queue(queue) else "plain"

    def jobs(self) -> int:
        """Return how many jobs and requests to sessions are held now, without replicas that keep sessions loaded."""
        with self._lock:
            return self._resources.count("job", "request")

    def free_jobs(self) -> int | None:
        """Return how many more jobs could begin, None for no limit by number."""
        with self._lock:
            if not self._resources.takes_jobs():
                return 0
            return None if self.limits.max_jobs is None else max(0, self.limits.max_jobs - self._resources.jobs())

    def usage(self) -> HostUsage:
        """Return what is in use of the host, without the sessions that would be closed for a task that needs it."""
        with self._lock:
            return self._resources.usage(self.sessions.idle() if self.sessions is not None else ())

    def is_replica(self, tag: str) -> bool:
        """Whether the message of `tag` keeps a session loaded."""
        with self._lock:
            allocation = self._held.get(tag)
            return allocation is not None and allocation.slot == "replica"

    def replicas(self) -> list[str]:
        """Return the tags of the messages that keep sessions loaded, or are about to."""
        with self._lock:
            return [tag for tag, one in self._held.items() if one.slot == "replica"]

    def tags_on(self, uuid: str) -> list[str]:
        """Return the delivery tags of the messages that are worked on by a GPU."""
        with self._lock:
            return self._resources.on(uuid)

    def idle(self) -> bool:
        """Whether nothing but control tasks and notices is held."""
        with self._lock:
            return all(held.slot in ("control", "notice") for held in self._held.values())

    def has_had_its_job(self) -> bool:
        """Whether a worker for one job has had it, to the end."""
        with self._lock:
            return (
                self.limits.one_job_only
                and self.limits.jobs_taken > 0
                and not any(held.slot in ("job", "ending") for held in self._held.values())
            )

    def unload_idle(self, why: str) -> None:
        """Close every session that idles."""
        if self.sessions is not None and (idle := self.sessions.idle()):
            self.sessions.evict(idle, why=why)

    def free_gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that could be taken now, by any worker of the machine."""
        whole = self._gpus.snapshot(self.capability).whole
        return tuple(gpu.uuid for gpu in self.capability.gpus if gpu.uuid in whole)

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _is_taking(self) -> bool:
        return self.enabled and not self.draining

    def _takes_jobs(self) -> bool:
        return self._is_taking and self._resources.takes_jobs()

    def _warm_names(self) -> tuple[str, ...]:
        """Return the sessions that may be given a request now."""
        if self.sessions is None or not self._is_taking or not self._resources.takes_requests():
            return ()
        return self.sessions.names(idle=self._resources.takes_jobs())

    def _is_open(self, queue: str) -> bool:
        slot = self.slot_of(queue)
        if slot == "control":
            return self._resources.takes_control()
        if slot == "notice":
            return self._resources.takes_notices()
        return slot == "plain" and self._is_taking and self._resources.takes_plain()

    def _served(self, ready: Sequence[str], barren: Collection[str]) -> Mapping[str, Requirement]:
        """Return what this worker serves of `ready`, in order, while it takes jobs; looks at the reservation too."""
        if not ready or not self.waits_as:
            return {}
        self.reserving.look(ready)
        return self.matcher.served(name for name in ready if name not in barren)

    def _startable(self, served: Mapping[str, Requirement]) -> Iterator[tuple[str, Placement]]:
        return self._placements.startable(served) if self._takes_jobs() else iter(())

    def _selection(self, queue: str, placement: Placement) -> SelectedQueue:
        with_gpus = self._placements.asked(queue).gpu_count > 0
        seconds = placement.max_runtime_seconds
        return SelectedQueue(queue=queue, most_seconds=ANY_TIME if seconds is None else seconds, with_gpus=with_gpus)

    def _let_go(self, tag: str, allocation: Allocation, *, quietly: bool = False) -> None:
        """Give place and GPUs back; it may take some seconds until nothing is left on these, so not under the lock."""
        if self.sessions is not None and allocation.session:
            self.sessions.leave(tag, quietly=quietly)
        with self._lock:
            hold, allocation.hold = allocation.hold, None
        if hold is not None:
            self._gpus.release(hold)
