"""How one worker stands to one task: free, busy with what, kept away by what, or which requirement fails. Pure.

Used by `gpuflow.routing.explain` and by the checks at submit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, Literal

from gpuflow.protocol import is_user_type
from gpuflow.routing.capability import Capability
from gpuflow.routing.describe import ago
from gpuflow.routing.fit import Fit, match, nearness
from gpuflow.routing.offers import (
    Lack,
    in_words,
    is_function,
    is_replica,
    not_allowed,
    not_offered,
    task_type_of,
    without_code,
    without_replica,
)
from gpuflow.routing.placement import FreeGpus, HostUsage, Placement, ReservedBefore, Wait, place
from gpuflow.routing.queue_names import family_matches
from gpuflow.routing.reasons import Reason
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.units import show_gb
from gpuflow.routing.views import Reservation, RunningTask, TaskView, WorkerView

Kind = Literal[
    "free", "busy", "reserved", "spread", "avoided", "connecting", "foreign",
    "disabled", "disk_full", "restricted", "no_executor", "not_allowed", "outdated", "gpu_problem",
    "draining", "silent", "offline", "unfit",
]  # fmt: skip


class Distance(IntEnum):
    """How far a worker is from running a task: by whom what keeps it away is ended. The nearest are told first, and
    they are why the task does not run; those that are farther are told after them.
    """

    NONE = 0  #: it can take the task now
    PASSES = 1  #: what keeps it ends by itself
    HINDERED = 2  #: it is there, and somebody can end what keeps it
    GONE = 3  #: it has stopped, or is gone, and takes the task once it is started again
    UNFIT = 4  #: its machine has not what the task asks for


#: Kinds by distance. Those of HINDERED by what ends them: a command, room on a disk, a start with other settings, an
#: upgrade, a mend of the machine; and last where nobody can do it to this worker: it ends, or does not answer.
_KINDS: Final[Mapping[Distance, tuple[Kind, ...]]] = {
    Distance.NONE: ("free",),
    Distance.PASSES: ("busy", "reserved", "spread", "avoided", "connecting", "foreign"),
    Distance.HINDERED: (
        *("disabled", "disk_full", "restricted", "no_executor", "not_allowed", "outdated", "gpu_problem"),
        *("draining", "silent"),
    ),
    Distance.GONE: ("offline",),
    Distance.UNFIT: ("unfit",),
}
_DISTANCES: Final = {kind: distance for distance, kinds in _KINDS.items() for kind in kinds}
#: In the order in which they are told.
ORDER: Final = tuple(_DISTANCES)
#: What ends by itself.
PASSING: Final = frozenset(_KINDS[Distance.NONE] + _KINDS[Distance.PASSES])
#: Kinds where workers are counted, and where something is told beside: "2 disabled", "it is also disabled".
IN_WORDS: Final[Mapping[Kind, str]] = {
    "busy": "busy",
    "reserved": "reserved for a bigger task",
    "spread": "with a replica of the model already",
    "avoided": "left out after a failure",
    "connecting": "connecting",
    "foreign": "held by a process outside gpuflow",
    "disabled": "disabled",
    "disk_full": "short of disk",
    "restricted": "kept away by -Q",
    "no_executor": "without the executor",
    "not_allowed": "closed to its code or secrets",
    "outdated": "too old",
    "draining": "draining",
    "silent": "silent",
    "offline": "gone",
}
#: Running tasks that are named; the others are counted.
_MAX_NAMED: Final = 3


@dataclass(frozen=True, kw_only=True)
class Situation:
    """`text` goes on after the worker's name: "is busy with train (7aa1)"; `reasons` are there only if the machine has
    not what is asked for, and then it goes on after "the task".

    `also` is what keeps the worker away beside `kind`; `stopped` says of one that is offline that it stopped by itself.
    `mend` is the command that mends it on that worker's machine, where there is one. `limits` is what holds the task to
    the memory and CPUs that it asks for there, and what is in the way of more; None where it asks for neither.
    """

    worker: str
    kind: Kind
    text: str
    also: tuple[Kind, ...] = ()
    stopped: bool = False
    reasons: tuple[Reason, ...] = ()
    nearness: float = 0.0
    tasks: tuple[RunningTask, ...] = ()
    mend: str = ""
    limits: tuple[str, str] | None = None

    @property
    def fits(self) -> bool:
        """Whether the machine has what the task asks for, however it is occupied."""
        return not self.reasons

    @property
    def distance(self) -> Distance:
        """How far the worker is from running the task."""
        return _DISTANCES[self.kind]

    @property
    def would_take_it(self) -> bool:
        """Whether a worker that is offline would take the task once it is started again as it was, and enabled."""
        return self.kind == "offline" and set(self.also) <= {"disabled"}

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key: the nearest to running the task first; `Distance` says what counts as near."""
        return (self.distance, not self.fits, len(self.also), ORDER.index(self.kind), self.nearness)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "id": self.worker,
            "fits": self.fits,
            "situation": self.kind,
            "text": self.text,
            "reasons": [reason.message for reason in self.reasons] or ([] if self.kind == "free" else [self.text]),
            "failing": [reason.to_dict() for reason in self.reasons],
            "limits": None if self.limits is None else {"by": self.limits[0], "why": self.limits[1]},
            "tasks": [{"id": task.id, "name": task.name, "runningSeconds": task.seconds} for task in self.tasks],
        }


def judge(ask: Requirement, queue: str, task: TaskView, worker: WorkerView) -> Situation:
    """Return how a worker stands to a task of `queue`."""
    fit = _fit(ask, worker)
    is_broken = _is_broken(fit, worker)
    if not fit.fits and not is_broken:
        more = len(fit.reasons) - 1
        rest = f"; {more} more {'requirement fails' if more == 1 else 'requirements fail'}" if more else ""
        return Situation(
            worker=worker.id,
            kind="unfit",
            text=f"{fit.reasons[0].message}{rest}",
            reasons=fit.reasons,
            nearness=nearness(fit),
        )
    lack = _lack(ask, task, worker)
    kept: dict[Kind, str] = {}
    if is_broken:
        kept["gpu_problem"] = f"{fit.reasons[0].message}: {worker.gpu_problems[0]}"
    for one, why in _hindrances(queue, task, worker, lack):
        kept.setdefault(one, why)
    has_room = "has room" if worker.tasks else "is free"
    (kind, text), *others = kept.items() or [_passing(ask, queue, task, worker) or ("free", has_room)]
    also = tuple(other for other, _ in others)
    besides = f"; it is also {' and '.join(IN_WORDS[other] for other in also)}" if also else ""
    return Situation(
        worker=worker.id,
        kind=kind,
        text=text + besides,
        also=also,
        stopped=worker.stopped,
        reasons=fit.reasons,
        tasks=worker.tasks,
        mend=lack.mend if lack is not None and kind == "no_executor" else "",
        limits=worker.limits if ask.cpu or ask.memory_mib else None,
    )


def disk_full_text(capability: Capability) -> str:
    """Return what is told of a worker with too little free disk, after its name."""
    floor = capability.disk_floor_mib
    return f"has {capability.disk_free_mib} MiB of disk free, less than its floor of {floor} MiB"


def _fit(ask: Requirement, worker: WorkerView) -> Fit:
    """Return whether the machine has what is asked for. That its disk is full is no part of that: it passes."""
    fit = match(ask, worker.capability)
    if fit.fits or not worker.capability.lacks_disk:
        return fit
    with_room = match(ask, replace(worker.capability, disk_floor_mib=0))
    return with_room if with_room.fits or _is_broken(with_room, worker) else fit


def _is_broken(fit: Fit, worker: WorkerView) -> bool:
    """Whether a worker has too few GPUs for a task, and some that cannot be used: these may be the ones."""
    return bool(worker.gpu_problems) and [reason.kind for reason in fit.reasons] == ["gpu_count"]


def _passing(ask: Requirement, queue: str, task: TaskView, worker: WorkerView) -> tuple[Kind, str] | None:
    """Return what keeps a worker from the task and ends by itself."""
    double = _doubled(task, worker)
    if double is not None and not worker.kept[task.session]:  # without GPUs it never takes a second one
        return _held_off(task, worker) or double
    return _held_off(task, worker) or _occupied(ask, queue, task, worker) or double


def _lack(ask: Requirement, task: TaskView, worker: WorkerView) -> Lack | None:
    """Return what keeps a worker from offering what a task asks to be run by."""
    offers = worker.gpu_offers if ask.gpu_count and worker.gpu_offers is not None else worker.offers
    if offers is None or not task.executor or task.executor in offers.names:
        return None
    if is_replica(task.executor) and without_replica(task.executor) in offers.names:
        return Lack(
            why="it keeps no model loaded (--ephemeral, or GPUFLOW_SESSION_IDLE_SEC=0), or its gpuflow is older than "
            "served models"
        )
    name = without_code(task.executor)
    if name in offers.names:
        return Lack(why="its gpuflow is older than tasks with code of their own, so that it takes none; upgrade it")
    if is_function(name):
        return Lack(why="no module that it was started with (--include) registers it")
    return offers.lacking.get(name) or Lack(why="no executor and no environment there has that name")


def _hindrances(queue: str, task: TaskView, worker: WorkerView, lack: Lack | None) -> Iterator[tuple[Kind, str]]:
    """Yield all that keeps a worker from the task until somebody ends it, what counts for every task first."""
    if worker.state == "OFFLINE":
        heard = "" if worker.silent_seconds is None else f": it was last heard of {ago(worker.silent_seconds)} ago"
        yield "offline", f"{'has stopped' if worker.stopped else 'is gone'}{heard}"
    if worker.state == "SILENT":
        yield "silent", f"is silent: it was last heard of {ago(worker.silent_seconds or 0)} ago"
    if worker.state == "DRAINING":
        yield "draining", "is draining: it ends what it runs and takes nothing new"
    if not worker.enabled:
        who = f" {worker.disabled_by};" if worker.disabled_by else ":"
        yield "disabled", f"is disabled{who} it takes nothing until it is enabled again"
    if worker.capability.lacks_disk:
        yield "disk_full", disk_full_text(worker.capability)
    if worker.record_schema is not None and worker.record_schema < task.record_schema:
        yield "outdated", "has an older gpuflow than the sender of the task, and leaves it to newer workers"
    task_type = task_type_of(task.executor)
    limited = None if is_function(task_type) else worker.executors
    if limited is not None and task_type and task_type not in limited:
        yield "no_executor", f"has no executor {task_type}: it was started with --executors {','.join(limited)}"
    if is_user_type(task_type) and task_type not in (worker.user_types or ()):
        yield "no_executor", f"has no executor {task_type}: no package there registers it, nor GPUFLOW_EXECUTORS"
    forbidden = "" if worker.allows_code is None else not_allowed(task.executor, worker.allows_code)
    if forbidden:
        yield "not_allowed", forbidden
    if worker.secrets is not None and (lacking := not_offered(task.secrets, worker.secrets)):
        yield "not_allowed", lacking
    if worker.families is not None and not any(family_matches(queue, family) for family in worker.families):
        served = ",".join(worker.families)
        yield (
            "restricted",
            f"does not serve {queue}: " + (f"its -Q is {served}" if served else "its -Q has no such queue"),
        )
    if lack is not None and not forbidden:  # of what it does not allow it offers nothing
        what = in_words(task.executor)
        yield "no_executor", f"has no {what if is_function(task.executor) else f'executor {what}'}: {lack.why}"


def _held_off(task: TaskView, worker: WorkerView) -> tuple[Kind, str] | None:
    """Return what keeps a worker from the task for a while, whatever else it does."""
    if task.avoids == worker.id and (task.avoid_seconds or 0) > 0:
        return "avoided", f"is left out for {ago(task.avoid_seconds or 0)} more: the last attempt failed there"
    if worker.state == "CONNECTING":
        return "connecting", "is connecting to the broker"
    return None


def _doubled(task: TaskView, worker: WorkerView) -> tuple[Kind, str] | None:
    """Return what keeps a worker from a replica of a model of which it has one."""
    if not is_replica(task.executor) or task.session not in worker.kept:
        return None
    has_gpus = worker.kept[task.session]
    rest = "leaves this one to others for a while" if has_gpus else "a second one would share its CPUs"
    return "spread", f"keeps a replica of this model already, and {rest}"


def _occupied(ask: Requirement, queue: str, task: TaskView, worker: WorkerView) -> tuple[Kind, str] | None:
    """Return what occupies a worker that would take the task."""
    everything = worker.capability
    unheld = FreeGpus(whole=frozenset(gpu.uuid for gpu in everything.gpus), foreign_mib=worker.foreign_mib)
    if not ask.shares and not match(ask, unheld.offered(ask, everything)).fits:
        return "foreign", _foreign_text(worker, everything)
    wait = _wait(ask, queue, task, worker)
    if wait is None:
        return None
    if wait.blocked_by == "reservation" and worker.reservation is not None:
        return "reserved", _reserved_text(worker.reservation)
    return "busy", _busy_text(worker) + (f"; {wait.reason}" if wait.reason else "")


def _wait(ask: Requirement, queue: str, task: TaskView, worker: WorkerView) -> Wait | None:
    """Return what the task waits for on the worker; by its state where it does not tell what is in use."""
    if worker.free_jobs is not None and worker.free_jobs <= 0:
        return Wait(blocked_by="host")
    free_gpus = worker.free_gpus
    if free_gpus is None:
        free_gpus = tuple(gpu.uuid for gpu in worker.capability.gpus)
    free = FreeGpus(whole=frozenset(free_gpus), room_mib=worker.room_mib or {}, foreign_mib=worker.foreign_mib)
    if ask.shares and worker.room_mib is None:
        free = replace(free, room_mib={gpu.uuid: gpu.total_mib for gpu in worker.capability.gpus})
    reserved = _reserved_before(queue, task, worker)
    usage = worker.usage or HostUsage()
    placed = place(ask, worker.capability, usage, free, reserved)
    if isinstance(placed, Placement) and placed.max_runtime_seconds is not None:
        # It may use what is reserved for a while: what is free, that is; no model is evicted for that.
        unheld = replace(
            free,
            whole=free.whole - worker.idle_gpus,
            room_mib={uuid: mib - worker.idle_mib.get(uuid, 0) for uuid, mib in free.room_mib.items()},
        )
        placed = place(ask, worker.capability, usage.with_idle(), unheld, reserved)
        if isinstance(placed, Wait):
            return Wait(blocked_by="reservation")
    if isinstance(placed, Wait):
        return placed
    most = placed.max_runtime_seconds
    if most is not None and (task.limit_seconds is None or task.limit_seconds > most):
        return Wait(blocked_by="reservation")
    return Wait(blocked_by="host") if worker.state == "BUSY" and not _tells(worker, ask) else None


def _tells(worker: WorkerView, ask: Requirement) -> bool:
    """Whether a worker tells what is in use of what is asked for; older ones do not."""
    if ask.shares:
        return worker.room_mib is not None
    return worker.free_gpus is not None if ask.gpu_count else worker.usage is not None or worker.free_jobs is not None


def _reserved_before(queue: str, task: TaskView, worker: WorkerView) -> ReservedBefore | None:
    """Return the reservation that the task has to respect."""
    held = worker.reservation
    if held is None or held.task == task.id or held.queue == queue or held.queue in task.ahead_of:
        return None
    gpus = held.gpus or tuple(gpu.uuid for gpu in worker.capability.gpus)
    is_served = held.asked is not None and match(held.asked, worker.capability).fits
    return ReservedBefore(
        gpus=gpus, asked=held.asked if held.asked and is_served else Requirement(), seconds=held.seconds_left
    )


def _reserved_text(held: Reservation) -> str:
    which = [f"needs {len(held.gpus)} GPUs"] if len(held.gpus) > 1 else []
    which += [] if held.seconds is None else [f"has waited for {ago(held.seconds)}"]
    clause = f", which {' and '.join(which)}" if which else ""
    return f"is reserved for {_named(held.name, held.task)}{clause}"


def _busy_text(worker: WorkerView) -> str:
    tasks = sorted(worker.tasks, key=lambda task: -(task.seconds or 0))
    if not tasks:
        return "is busy"
    named = [
        _named(task.name, task.id) + ("" if task.seconds is None else f", started {ago(task.seconds)} ago")
        for task in tasks[:_MAX_NAMED]
    ]
    more = f" and {len(tasks) - _MAX_NAMED} more" if len(tasks) > _MAX_NAMED else ""
    return f"is busy with {'; '.join(named)}{more}"


def _foreign_text(worker: WorkerView, everything: Capability) -> str:
    held = [(gpu, worker.foreign_mib[gpu.uuid]) for gpu in everything.gpus if gpu.uuid in worker.foreign_mib]
    where = ", ".join(f"{show_gb(mib / 1024)} of GPU {gpu.index} ({gpu.name})" for gpu, mib in held[:_MAX_NAMED])
    more = f" and of {len(held) - _MAX_NAMED} more" if len(held) > _MAX_NAMED else ""
    return f"is held by a process outside gpuflow, which uses {where}{more}"


def _named(name: str, task_id: str) -> str:
    return f"{name} ({task_id})" if name and name != task_id else task_id
