"""What `explain` is told of workers, queues and tasks. Plain values; None means that it is not known.

Built by `gpuflow.explaining` from the registry and the records. Times are spans in seconds up to now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuflow.routing.capability import Capability
from gpuflow.routing.offers import Offers
from gpuflow.routing.placement import HostUsage
from gpuflow.routing.requirement import Requirement


@dataclass(frozen=True, kw_only=True)
class RunningTask:
    """A task that a worker runs."""

    id: str
    name: str = ""
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """GPUs of a machine that are kept for a task which waits for more of them; no `gpus` means all.

    `queue` is where the task waits, `asked` what it asks for (None: not known), `seconds` how long it has waited, and
    `seconds_left` when it hopes to start: what ends before may use the GPUs (None: not known).
    """

    task: str
    name: str = ""
    gpus: tuple[str, ...] = ()
    seconds: float | None = None
    queue: str = ""
    asked: Requirement | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """A worker. `state` is that of the registry; `stopped` says of one that has gone that it stopped by itself.

    `disabled_by` says who disabled it and why, where it is known; `idled` that the autoscaler did, which enables it
    again when there is work for it.
    `families` are the demand queues of its -Q (None: it has none, it serves all), `executors` those of its
    --executors (None: all), `user_types` the users' own task types that it can run, `offers` what it runs for tasks
    without GPUs and `gpu_offers` for those with (None: not told), `allows_code` the kinds of code that
    tasks may bring there and `secrets` the names of those that it offers (None: not told), `free_gpus` the UUIDs that
    a task could have now, `free_jobs` how many more tasks it could start, `foreign_mib` what processes outside
    gpuflow hold, by the UUID of each GPU that is held back for it, `room_mib` what is left of each GPU for tasks
    that share it, `limits` what holds tasks to the memory and CPUs that they ask for, and what is in the way of more,
    `record_schema` the newest records that it reads (None: not told), `kept` the sessions that replicas of served
    models keep loaded, with whether they have GPUs, `usage` what is in use of its host (None: not told), `idle_gpus`
    those of `free_gpus` that models hold which idle, and `idle_mib` how much of `room_mib` is theirs: these are evicted
    first. `gpu_problems` say why GPUs of the machine cannot be used, which are no part of `capability`.
    """

    id: str
    capability: Capability
    state: str = "IDLE"
    enabled: bool = True
    disabled_by: str = ""
    idled: bool = False
    stopped: bool = False
    silent_seconds: float | None = None
    families: tuple[str, ...] | None = None
    executors: tuple[str, ...] | None = None
    user_types: tuple[str, ...] | None = None
    offers: Offers | None = None
    gpu_offers: Offers | None = None
    allows_code: tuple[str, ...] | None = None
    secrets: tuple[str, ...] | None = None
    free_gpus: tuple[str, ...] | None = None
    free_jobs: int | None = None
    tasks: tuple[RunningTask, ...] = ()
    reservation: Reservation | None = None
    foreign_mib: Mapping[str, int] = field(default_factory=dict)
    room_mib: Mapping[str, int] | None = None
    limits: tuple[str, str] | None = None
    record_schema: int | None = None
    kept: Mapping[str, bool] = field(default_factory=dict)
    usage: HostUsage | None = None
    idle_gpus: frozenset[str] = frozenset()
    idle_mib: Mapping[str, int] = field(default_factory=dict)
    gpu_problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """A queue: how many messages wait in it, which of them the task's is (1 is next), how old the oldest is."""

    name: str
    depth: int | None = None
    place: int | None = None
    oldest_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class TaskView:
    """A task; without a state it has not been submitted.

    `executor` is its task type, or what it asks to be run by (`routing.offers`), `secrets` the names that it
    asks for, `wait_seconds` how long it must wait
    before its next attempt, `avoids` the worker on which it failed and which it is kept from for `avoid_seconds`,
    `worker` where it runs, since `running_seconds`; `record_schema` is what a worker has to read; `session` the name of
    the sessions that can answer it, `limit_seconds` its time limit, and `ahead_of` the queues with reservations that
    its own stands before.
    """

    name: str
    id: str = ""
    state: str | None = None
    executor: str = ""
    secrets: tuple[str, ...] = ()
    attempt: int = 0
    priority: int = 5
    wait_seconds: float | None = None
    avoids: str | None = None
    avoid_seconds: float | None = None
    worker: str | None = None
    running_seconds: float | None = None
    record_schema: int = 1
    session: str = ""
    limit_seconds: float | None = None
    ahead_of: frozenset[str] = frozenset()
