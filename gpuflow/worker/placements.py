"""Which demand queues have room on a worker now: whose next message could start, and on which GPUs.

Asked by the admission, under its lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from gpuflow.broker.gate import SelectedQueue
from gpuflow.routing.capability import Capability
from gpuflow.routing.fit import match
from gpuflow.routing.placement import GpuGrant, Placement, place
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.queue_matcher import QueueMatcher
from gpuflow.worker.reserving import Reserving
from gpuflow.worker.resource_usage import ResourceUsage
from gpuflow.worker.sessions.entry import SessionEntry


class Placements:
    """What could start on one worker, and what would have to be evicted for it."""

    def __init__(
        self, matcher: QueueMatcher, gpus: MachineGpus, reserving: Reserving, resources: ResourceUsage
    ) -> None:
        self._matcher = matcher
        self._gpus = gpus
        self._resources = resources
        self.reserving = reserving

    @property
    def capability(self) -> Capability:
        """All that this worker has, free or not."""
        return self._matcher.capability

    def asked(self, queue: str) -> Requirement:
        """Return what a queue asks for."""
        return self._matcher.requirement(queue) or Requirement()

    def startable(self, served: Mapping[str, Requirement]) -> Iterator[tuple[str, Placement]]:
        """Yield the queues whose next message could start now, each with what it may use."""
        if not served:
            return
        free, usage, whole = self._gpus.snapshot(self.capability), self._resources.usage(), self.capability
        uses_gpus = False
        for queue, asked in served.items():
            placed = place(asked, whole, usage, free, self.reserving.before(queue, self.asked))
            if isinstance(placed, Placement):
                uses_gpus = uses_gpus or asked.gpu_count > 0
                yield queue, placed
            elif self._may_starve(asked) and not uses_gpus:
                self.reserving.reserve(queue, asked, whole, free.offered(asked, whole))

    def warm_only(self, queues: Sequence[str], *, most: int, beyond: bool) -> list[SelectedQueue]:
        """Return at most so many choices of queues that have no room: a warm session alone could take from them.

        Where there is none, `beyond` looks for tasks whose GPUs an idle session of another worker may hold.
        """
        sessions = self._resources.sessions
        asks = {queue: self.asked(queue) for queue in queues}
        if sessions is None or not sessions.here():
            asks = {queue: asked for queue, asked in asks.items() if beyond and asked.gpu_count}
        return [
            SelectedQueue(queue=queue, with_gpus=asked.gpu_count > 0, warm_only=True, yields=self.yields(asked))
            for queue, asked in list(asks.items())[:most]
        ]

    def yields(self, asked: Requirement) -> bool:
        """Whether a task could start if the sessions that have served long enough took no more requests."""
        served = self._resources.sessions.served() if self._resources.sessions is not None else []
        return bool(served) and self.fits_without(asked, served)

    def fits_without(self, asked: Requirement, sessions: Collection[SessionEntry]) -> bool:
        """Whether a task could start when some sessions have gone with all that they hold."""
        released = [GpuGrant(gpus=entry.gpus, share_mib=entry.hold.share_mib) for entry in sessions if entry.hold]
        free = self._gpus.snapshot(self.capability).plus(released, self.capability)
        reserved = self.reserving.before(asked.queue_name(), self.asked)
        placed = place(asked, self.capability, self._resources.usage(sessions), free, reserved)
        return isinstance(placed, Placement) and placed.max_runtime_seconds is None

    def evict_for(self, asked: Requirement, why: str) -> bool:
        """Close sessions that idle, those that were used longest ago, until a task would fit; say whether it will.

        None is closed that does not help, and none beyond what those that are already going give back.
        """
        sessions = self._resources.sessions
        if sessions is None:
            return False
        going = sessions.going()
        if self.fits_without(asked, going):
            return True
        chosen: list[SessionEntry] = []
        for entry in sessions.idle():
            chosen.append(entry)
            if self.fits_without(asked, [*going, *chosen]):
                break
        else:
            return False
        for entry in chosen[::-1]:
            others = [one for one in chosen if one is not entry]
            if self.fits_without(asked, [*going, *others]):
                chosen = others
        sessions.evict(chosen, why=why)
        return True

    def _may_starve(self, asked: Requirement) -> bool:
        """Whether smaller tasks could keep one from its GPUs for ever: for several, or for one that is shared now."""
        return asked.gpu_count > 1 or (not asked.shares and self._gpus.shared())

    def serves(self, queue: str, placement: Placement, first: Requirement, gpus: tuple[str, ...]) -> bool:
        """Whether a message of `queue` could use exactly the GPUs that are held for `first`, or needs none."""
        asked = self.asked(queue)
        if not asked.gpu_count:
            return True
        if asked.shares or first.shares:
            return asked == first
        fit = match(asked, placement.capability.only(gpus))
        return fit.fits and set(fit.gpus) == set(gpus)
