"""The values that scaling decides with: the fleet as it was seen, the policy, and the actions. Plain and frozen.

Spans are in seconds up to the moment of the snapshot, on the server's clock. Costs are per hour, in any one currency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from gpuflow.routing.capability import Capability
from gpuflow.routing.requirement import Requirement

#: What a machine that was launched is: it comes, its worker has registered, or its end has been decided.
MachineState = Literal["launching", "running", "ending"]


class Kind(StrEnum):
    """What may be done to a fleet."""

    ENABLE = "enable"
    DISABLE = "disable"
    DRAIN = "drain"
    LAUNCH = "launch"
    RETIRE = "retire"


@dataclass(frozen=True, kw_only=True)
class Action:
    """One step, with its reason in plain English. LAUNCH names a family, every other kind a worker."""

    kind: Kind
    reason: str
    worker: str = ""
    family: str = ""
    spot: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """A worker as it was seen.

    `enabled` is what is wanted of it, `by_hand` whether an operator wanted it, `alive` whether it may be counted on.
    `families` are the demand queues of its -Q (None: all), `plain_queues` the other queues that it consumes by name.
    `leases` counts all messages that it holds. `idle_seconds` is None while it works, or where it is not known.
    `toggled_seconds` is how long ago what is wanted of it last changed; None: never.
    """

    id: str
    capability: Capability
    alive: bool = True
    enabled: bool = True
    draining: bool = False
    by_hand: bool = False
    ephemeral: bool = False
    families: tuple[str, ...] | None = None
    plain_queues: tuple[str, ...] = ()
    leases: int = 0
    most_jobs: int | None = None
    idle_seconds: float | None = None
    toggled_seconds: float | None = None
    cost_per_hour: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A queue and what waits and runs of it; `requirement` is None for a plain Celery queue.

    `waiting` is by priority, 9 to 0. `task_seconds` is the mean time of its last tasks; None: none has ended yet.
    """

    queue: str
    requirement: Requirement | None = None
    waiting: Mapping[int, int] = field(default_factory=dict)
    running: int = 0
    oldest_seconds: float = 0.0
    task_seconds: float | None = None

    @property
    def depth(self) -> int:
        """How many messages wait."""
        return sum(self.waiting.values())

    @property
    def urgency(self) -> tuple[float, float, str]:
        """Sort key: the highest priority that waits first, then the oldest message."""
        best = max((priority for priority, count in self.waiting.items() if count), default=-1)
        return (-best, -self.oldest_seconds, self.queue)


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """A machine that was launched; its worker has its id."""

    id: str
    family: str
    state: MachineState
    age_seconds: float = 0.0
    spot: bool = False
    cost_per_hour: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The fleet at one moment.

    `age_seconds` is how long ago reading it began. `gathering`: the broker has just come back and does not know yet
    what is held. `held_back` are the families that may not be launched for so many seconds, after failures.
    """

    workers: tuple[WorkerFacts, ...] = ()
    demands: tuple[Demand, ...] = ()
    machines: tuple[MachineFacts, ...] = ()
    held_back: Mapping[str, float] = field(default_factory=dict)
    age_seconds: float = 0.0
    gathering: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of machine that can be launched.

    `least` and `most` machines of it exist at once. `spot_share` is the part of them that is launched as spot machines.
    `slots` is how many tasks a machine takes at once; None: as many as fit. `families` and `plain_queues` are what the
    -Q of its workers names: the demand queues and the other ones; None: it has no -Q.
    """

    name: str
    capability: Capability
    least: int = 0
    most: int = 1
    target_backlog_seconds: float = 300.0
    idle_seconds: float | None = None
    cost_per_hour: float = 0.0
    spot_cost_per_hour: float | None = None
    spot_share: float = 0.0
    slots: int | None = None
    families: tuple[str, ...] | None = None
    plain_queues: tuple[str, ...] | None = None

    def cost(self, *, spot: bool) -> float:
        """Return what an hour of one machine costs."""
        return self.spot_cost_per_hour if spot and self.spot_cost_per_hour is not None else self.cost_per_hour


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the operator wants; the names of the knobs are those of the settings ELASTIC_AUTO_*.

    A worker is disabled when it has idled for `idle_seconds` while its queues hold at most `disable_queue_max`
    messages, never more than down to `min_active`, nor within `cooldown_seconds` after it was enabled. It is enabled
    when something waits that finds no free slot. Machines are launched when a queue holds `enable_threshold` messages,
    or its oldest has waited for the target backlog. A snapshot that is older than `stale_seconds` leads to nothing.
    `budget_per_hour` caps what all launched machines cost.
    """

    idle_seconds: float = 60.0
    enable_threshold: int = 5
    disable_queue_max: int = 2
    min_active: int = 1
    cooldown_seconds: float = 60.0
    target_backlog_seconds: float = 300.0
    stale_seconds: float = 10.0
    budget_per_hour: float | None = None
    families: tuple[Family, ...] = ()
