"""Sums the slots, CPUs and memory that admitted messages use on this worker. Plain data.

Kept by the admission, under its lock. GPUs are in the locks of the machine, which binds all workers on it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from gpuflow.routing.placement import HostUsage
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.sessions.entry import SessionEntry
from gpuflow.worker.sessions.table import Sessions
from gpuflow.worker.slots import CONTROL_SLOTS, NOTICE_SLOTS, Allocation, Limits, SlotClass


@dataclass(kw_only=True)
class ResourceUsage:
    """Allocations by delivery tag, next to the limits of the worker and what its warm sessions use."""

    limits: Limits
    sessions: Sessions | None = None
    held: dict[str, Allocation] = field(default_factory=dict)

    def count(self, *slots: SlotClass) -> int:
        """Return how many messages hold one of these slots."""
        return sum(1 for one in self.held.values() if one.slot in slots)

    def jobs(self) -> int:
        """Return how many child processes work now. A session counts while it answers, and not while it idles."""
        return self.count("job") + len(self._working())

    def _working(self, without: Collection[SessionEntry] = ()) -> list[Requirement]:
        return self.sessions.working(without) if self.sessions is not None else []

    def on(self, uuid: str) -> list[str]:
        """Return the tags of the messages that are worked on by a GPU."""
        mine = [tag for tag, one in self.held.items() if uuid in one.gpus]
        return mine + (self.sessions.tags_on(uuid) if self.sessions is not None else [])

    def takes_jobs(self) -> bool:
        """Whether one more child may work."""
        limits = self.limits
        if limits.one_job_only and limits.jobs_taken:
            return False
        return self.takes_requests() and (limits.max_jobs is None or self.jobs() < limits.max_jobs)

    def takes_requests(self) -> bool:
        """Whether a thread is there for one more job, or request of a session."""
        return self.count("plain", "request", "job") < self.limits.threads

    def takes_plain(self) -> bool:
        """Whether a thread is there for one more plain task."""
        return self.count("plain", "request") < self.limits.threads

    def takes_control(self) -> bool:
        """Whether one more control task may begin."""
        return self.count("control") < CONTROL_SLOTS

    def takes_notices(self) -> bool:
        """Whether one more URL may be called."""
        return self.count("notice") < NOTICE_SLOTS

    def usage(self, without: Collection[SessionEntry] = ()) -> HostUsage:
        """Return what is in use of the host; `without` some idle sessions, as it will be when these have gone.

        A warm session keeps its memory while it idles, but not its CPUs.
        """
        held = [one for one in self.held.values() if one.slot == "job"]
        working = self._working(without)
        asks = [one.requirement for one in held if one.requirement is not None]
        undeclared = [one for one in held if not one.gpus and not (one.requirement and one.requirement.cpu)]
        undeclared_sessions = [one for one in working if not one.gpu_count and not one.cpu]
        loaded_mib = self.sessions.memory_mib(without) if self.sessions is not None else 0
        all_loaded_mib = self.sessions.memory_mib() if self.sessions is not None else 0
        return HostUsage(
            cpus=sum(one.cpu or 0 for one in [*asks, *working]),
            memory_mib=sum(one.memory_mib or 0 for one in asks) + loaded_mib,
            undeclared_jobs=len(undeclared) + len(undeclared_sessions),
            undeclared_limit=self.limits.cpu_jobs if self.limits.max_jobs is None else None,
            idle_memory_mib=all_loaded_mib - loaded_mib,
        )
