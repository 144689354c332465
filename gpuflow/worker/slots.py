"""What a message holds while it is here: a slot, and the CPUs, memory and GPUs that its queue asks for. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from gpuflow.fleet.gpu_locks import Hold
from gpuflow.routing.requirement import Requirement

#: Control tasks (joins, dispatch) that may run at once, beside all other work.
CONTROL_SLOTS: Final = 4
#: Calls of the URLs of `notify` that may wait for their receivers at once.
NOTICE_SLOTS: Final = 2
#: Replicas of served models that one worker keeps loaded at most.
MOST_REPLICAS: Final = 256

#: `request`: it is answered by a warm session. `replica`: it keeps one loaded, and takes no thread of the others.
#: `ending`: the child of a job has gone and its result is being committed;
#: it holds no slot and no GPU any more.
SlotClass = Literal["control", "notice", "plain", "job", "request", "replica", "ending"]


@dataclass(kw_only=True)
class Allocation:
    """What one leased message holds: a slot, what its queue asks for, and the GPUs that it got.

    `session` is the name of the session in which it has a place; what that holds is not in here.
    """

    queue: str
    slot: SlotClass
    session: str = ""
    requirement: Requirement | None = None
    hold: Hold | None = None
    kept: bool = False
    lease_ended: bool = False

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
