"""What a message holds while it is here: a slot, and the CPUs, memory and GPUs that its queue asks for. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from gpuflow.routing.capability import Capability
from gpuflow.routing.requirement import Requirement

#: Control tasks (joins, dispatch) that may run at once, beside all other work.
CONTROL_SLOTS: Final = 4

#: `ending`: the child of a job has gone and its result is being committed; it holds no slot and no GPU any more.
SlotClass = Literal["control", "plain", "job", "ending"]


class Hold(Protocol):
    """GPUs of the machine that this worker has taken; the file descriptors keep them."""

    @property
    def uuids(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def fds(self) -> tuple[int, ...]: ...  # noqa: D102


class Gpus(Protocol):
    """The GPUs of the machine, which other workers may use as well (`worker.machine_gpus`)."""

    def free(self, capability: Capability) -> Capability:
        """Return the capability with those GPUs alone that could be taken now."""

    def take(self, uuids: tuple[str, ...]) -> Hold | None:
        """Take all of them or none."""

    def release(self, hold: Hold) -> None:
        """Give them back."""


@dataclass(kw_only=True)
class Allocation:
    """What one leased message holds: a slot, what its queue asks for, and the GPUs that it got."""

    queue: str
    slot: SlotClass
    requirement: Requirement | None = None
    hold: Hold | None = None
    claimed: bool = False
    settled: bool = False

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs."""
        return self.hold.uuids if self.hold is not None else ()


@dataclass(kw_only=True)
class Limits:
    """How much this worker takes at once. `max_jobs` None: as many children as fit its GPUs and CPUs."""

    threads: int = 64
    max_jobs: int | None = None
    cpu_jobs: int = 1
    one_job_only: bool = False
    jobs_taken: int = field(default=0)
