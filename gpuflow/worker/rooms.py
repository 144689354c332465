"""Which demand queues have room on a worker now: whose next message could start, and on which GPUs.

Asked by the admission, under its lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuflow.broker.gate import ANY_TIME
from gpuflow.routing.capability import Capability
from gpuflow.routing.fit import match
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.books import Books
from gpuflow.worker.demands import Demands
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.reserving import Reserving, Room


class Rooms:
    """The rooms of one worker."""

    def __init__(self, demands: Demands, gpus: MachineGpus, reserving: Reserving, books: Books) -> None:
        self._demands = demands
        self._gpus = gpus
        self._books = books
        self.reserving = reserving
        #: What the first task asks for that found no GPU when `of` was asked last.
        self.lacking: Requirement | None = None

    @property
    def capability(self) -> Capability:
        """All that this worker has, free or not."""
        return self._demands.capability

    def asked(self, queue: str) -> Requirement:
        """Return what a queue asks for."""
        return self._demands.requirement(queue) or Requirement()

    def of(self, served: Mapping[str, Requirement], ready: Sequence[str]) -> Iterator[tuple[str, Room]]:
        """Yield the queues whose next message could start now, each with what it may use."""
        self.lacking = None
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
                continue
            if asked.gpu_count and self.lacking is None:
                self.lacking = asked
            if self._may_starve(asked) and not uses_gpus:
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
        if not self._books.host_fits(asked, self.capability):
            return None
        kept = self.reserving.kept_from(queue, ready)
        beside = kept is None or self._books.host_fits(asked, self.capability, self.asked(kept))
        for room in self.reserving.room(queue, ready, free):
            if (beside or room.most_seconds != ANY_TIME) and match(asked, room.capability).fits:
                return room
        return None

    def yields(self, asked: Requirement) -> bool:
        """Whether a task could start if the sessions that have served long enough took no more requests."""
        sessions = self._books.sessions
        served = sessions.served_gpus() if sessions is not None else []
        if not asked.gpu_count:
            return bool(served)
        free = {gpu.uuid for gpu in self._gpus.free(self.capability).gpus}
        theirs = {uuid for gpus in served for uuid in gpus}
        return bool(theirs) and match(asked, self.capability.only(free | theirs)).fits

    def _may_starve(self, asked: Requirement) -> bool:
        """Whether smaller tasks could keep one from its GPUs for ever: for several, or for one that is shared now."""
        return asked.gpu_count > 1 or (not asked.shares and self._gpus.shared())

    def serves(self, queue: str, room: Room, first: Requirement, gpus: tuple[str, ...]) -> bool:
        """Whether a message of `queue` could use exactly the GPUs that are held for `first`, or needs none."""
        asked = self.asked(queue)
        if not asked.gpu_count:
            return True
        if asked.shares or first.shares:
            return asked == first
        fit = match(asked, room.capability.only(gpus))
        return fit.fits and set(fit.gpus) == set(gpus)
