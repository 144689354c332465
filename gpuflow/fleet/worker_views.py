"""From the registry to what `routing.explain` wants to know of each worker. Read-only.

What a worker does not tell is None there. Read from the entry's `load`, beside what everybody shows of it:

| field | JSON | what |
|---|---|---|
| `families` | list of text, or null | the demand queues of its -Q; null: it has none and serves all |
| `executors` | list of text, or null | those of --executors; null: all |
| `userTypes` | list of text | task types of users' own executors that are registered there |
| `offers` | {cpu: {names, lacking}, gpu: ...} | what it runs for tasks without GPUs and with; `routing.offers` |
| `allowsCode` | list of text | kinds of code that tasks may bring there; `policy.code` |
| `secrets` | list of text | names of the secrets that tasks may ask for there, never values; `policy.secrets` |
| `freeGpus` | list of UUIDs | GPUs that no task of gpuflow holds, on the whole machine |
| `gpusSeenAt` | number | when it saw so, on its machine's clock: the newest of a machine counts for all its workers |
| `locks` | {machine, directory, path} | the GPU locks: workers with the same one share GPUs |
| `sessions` | list of {model, engine, state, running, idle, gpus, shareMib} | its warm models; idle ones make room |
| `usage` | `routing.placement.HostUsage` | what is in use of its host, and what idle models use |
| `freeJobs` | number, or null | how many more tasks it could start; null: no limit |
| `foreignMib` | UUID -> MiB | GPUs that are held back because of processes outside gpuflow, and what these use |
| `roomMib` | UUID -> MiB | what is left of each GPU for tasks that share it |
| `reservation` | {task, queue, gpus: [UUID], secondsLeft} or null | the waiting task that GPUs are kept for |
| `protocol` | {fleet, oldest, record} | what its version reads and works beside (`fleet.versions`) |
| `limits` | {by, why} | what holds tasks to the memory and CPUs that they ask for (`worker.task_limits`) |
| `diskFreeMib`, `memoryAvailableMib` | number | free where results are written; memory left to the worker |
| `driverProblem` | text | why the NVIDIA devices of the machine cannot be used; '': one can, or there is none |
| `gpuProblems` | list of text | what is to be mended about its GPUs (`fleet.hardware`) |
| `kept` | session name -> bool | sessions that replicas of served models keep loaded; whether they have GPUs |
| `idleSeconds` | number, or null | how long it had held nothing but control tasks; null: it works (for scaling) |
| `maxJobs`, `costPerHour` | number, or null | its --max-jobs and --cost (for scaling) |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gpuflow.fleet.desired import AUTOMATIC, DesiredState
from gpuflow.fleet.registry import UNREADABLE, Fleet, WorkerEntry
from gpuflow.ledger.ledger import Ledger
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.routing.capability import CAPABILITY_SCHEMA, Capability
from gpuflow.routing.offers import Offers
from gpuflow.routing.placement import FreeGpus, GpuGrant, HostUsage
from gpuflow.routing.queue_names import is_demand_queue
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.views import Reservation, RunningTask, WorkerView
from gpuflow.terminal import one_line

#: What a task may be while GPUs are kept free for it.
_WAITS: Final = (TaskState.PENDING, TaskState.QUEUED)


def worker_views(
    fleet: Fleet, ledger: Ledger | None, now: float, entries: Sequence[WorkerEntry] | None = None
) -> list[WorkerView]:
    """Return a view of every worker, those that have gone too; `now` is Unix seconds on the server's clock.

    A worker whose entry cannot be read is left out. With a ledger, the tasks that they run have names and times.
    `entries` are the workers where they have been read already.
    """
    entries = fleet.workers() if entries is None else entries
    reserved = [found["task"] for entry in entries if (found := _mapping(entry.load.get("reservation"))).get("task")]
    ids = sorted({*(task for entry in entries for task in entry.tasks), *map(str, reserved)})
    records: dict[str, TaskRecord] = {}
    if ledger is not None and ids:
        records = {record.id: record for record in ledger.find_many(ids) if record is not None}
    newest = _newest_of_machines(entries)
    views = []
    for entry in entries:
        try:
            view = view_of(_as_seen_last(entry, newest), records, now)
            _check(view.capability)
        except UNREADABLE:
            continue
        views.append(view)
    return views


def _check(found: Capability) -> None:
    """Raise TypeError where a capability, which another machine has written, is not what it is compared as."""
    numbers = [found.cpu_count, found.memory_mib, found.disk_floor_mib]
    numbers += [number for gpu in found.gpus for number in (gpu.index, gpu.vram_gb, gpu.total_mib)]
    texts = [text for gpu in found.gpus for text in (gpu.uuid, *gpu.names)]
    texts += [text for label in found.labels for text in label]
    if not all(isinstance(one, int | float) for one in numbers) or not all(isinstance(one, str) for one in texts):
        raise TypeError("a capability with numbers or texts of another kind")


def _newest_of_machines(entries: Iterable[WorkerEntry]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the load of each machine whose worker has looked last at its GPUs."""
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for entry in entries:
        try:
            machine, at = _machine(entry.load), _seen_at(entry.load)
            _amounts(entry.load.get("roomMib"))
        except UNREADABLE:
            continue  # it is left out, and says nothing of the others of its machine
        if machine is not None and at > _seen_at(newest.get(machine, {})):
            newest[machine] = entry.load
    return newest


def _as_seen_last(entry: WorkerEntry, newest: Mapping[tuple[str, str], Mapping[str, Any]]) -> WorkerEntry:
    """Return the entry with its GPUs as the worker of its machine saw them that looked last."""
    load, machine = entry.load, _machine(entry.load)
    seen = newest.get(machine) if machine is not None else None
    if seen is None or seen is load:
        return entry
    its_room, room = _amounts(seen.get("roomMib")), _amounts(load.get("roomMib"))
    its_free = _texts(seen.get("freeGpus")) or ()
    free = [uuid for uuid in _texts(load.get("freeGpus")) or () if uuid not in its_room]
    free += [uuid for uuid in its_free if uuid in room]
    room |= {uuid: mib for uuid, mib in its_room.items() if uuid in room}
    return replace(entry, load={**load, "freeGpus": free, "roomMib": room})


def _machine(load: Mapping[str, Any]) -> tuple[str, str] | None:
    locks = _mapping(load.get("locks"))
    return (str(locks["machine"]), str(locks["directory"])) if {"machine", "directory"} <= locks.keys() else None


def _seen_at(load: Mapping[str, Any]) -> float:
    at = load.get("gpusSeenAt")
    return float(at) if isinstance(at, int | float) else 0.0


def view_of(entry: WorkerEntry, records: Mapping[str, TaskRecord], now: float) -> WorkerView:
    """Return the view of one worker."""
    load, capability = entry.load, capability_of(entry)
    unheld, free = _free_gpus(load, capability)
    return WorkerView(
        id=entry.id,
        capability=capability,
        state="DRAINING" if entry.drains and entry.is_there else str(entry.state),
        enabled=entry.takes_work,
        disabled_by=entry.desired.text() if not entry.takes_work else "",
        idled=entry.desired.state is DesiredState.DISABLED and entry.desired.by == AUTOMATIC,
        stopped=entry.stopped,
        silent_seconds=_silent_seconds(entry, now),
        families=_families(entry),
        executors=_texts(load.get("executors")),
        user_types=_texts(load.get("userTypes")),
        offers=_offers(load, "cpu"),
        gpu_offers=_offers(load, "gpu"),
        allows_code=_texts(load.get("allowsCode")),
        secrets=_texts(load.get("secrets")),
        free_gpus=None if load.get("freeGpus") is None else tuple(sorted(free.whole)),
        limits=_limits(load),
        record_schema=_record_schema(load),
        kept={name: bool(has_gpus) for name, has_gpus in _mapping(load.get("kept")).items()},
        free_jobs=load["freeJobs"] if isinstance(load.get("freeJobs"), int) else None,
        tasks=tuple(_running(task, records.get(task), now) for task in entry.tasks),
        reservation=_reservation(_mapping(load.get("reservation")), records, entry, now),
        foreign_mib=_amounts(load.get("foreignMib")),
        room_mib=None if load.get("roomMib") is None else dict(free.room_mib),
        usage=_usage(load),
        idle_gpus=free.whole - unheld.whole,
        idle_mib={uuid: mib - unheld.room_mib.get(uuid, 0) for uuid, mib in free.room_mib.items()},
        gpu_problems=_gpu_problems(load),
    )


def capability_of(entry: WorkerEntry) -> Capability:
    """Return what a worker can do, with the disk as of its last heartbeat; of a newer worker, what is understood."""
    capability = Capability.from_dict({**entry.capability, "schema": CAPABILITY_SCHEMA})
    free = entry.load.get("diskFreeMib")
    return replace(capability, disk_free_mib=int(free)) if isinstance(free, int | float) else capability


def _silent_seconds(entry: WorkerEntry, now: float) -> float | None:
    if entry.seen_seconds is not None:
        return entry.seen_seconds
    return max(0.0, now - entry.heartbeat_at) if entry.heartbeat_at else None


def _families(entry: WorkerEntry) -> tuple[str, ...] | None:
    if "families" in entry.load:
        return _texts(entry.load["families"])
    # A worker without -Q serves the plain queue too; with -Q it serves the families that it named.
    if any(not is_demand_queue(name) and not name.startswith("gpuflow.") for name in entry.queues):
        return None
    return tuple(name for name in entry.queues if is_demand_queue(name))


def _free_gpus(load: Mapping[str, Any], capability: Capability) -> tuple[FreeGpus, FreeGpus]:
    """Return the GPUs that nobody holds, and with them those of models that only idle: what a task could have."""
    free = FreeGpus(
        whole=frozenset(_texts(load.get("freeGpus")) or ()),
        room_mib=_amounts(load.get("roomMib")),
        foreign_mib=_amounts(load.get("foreignMib")),
    )
    sessions = [one for found in load.get("sessions") or () if (one := _mapping(found)).get("idle")]
    grants = [GpuGrant(gpus=_texts(one.get("gpus")) or (), share_mib=one.get("shareMib")) for one in sessions]
    return free, free.plus(grants, capability)


def _usage(load: Mapping[str, Any]) -> HostUsage | None:
    told = load.get("usage")
    if not isinstance(told, Mapping):
        return None  # an older worker
    usage = HostUsage.from_dict(told)
    numbers = (
        *(usage.cpus, usage.memory_mib, usage.idle_memory_mib),
        *(usage.undeclared_jobs, usage.undeclared_limit or 0),
    )
    if not all(isinstance(one, int | float) for one in numbers):
        raise TypeError("what is in use of a host is told in numbers")
    return usage


def _offers(load: Mapping[str, Any], kind: str) -> Offers | None:
    try:
        return Offers.from_dict(_mapping(load.get("offers"))[kind])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # an older worker, or one without GPUs


def _running(task_id: str, record: TaskRecord | None, now: float) -> RunningTask:
    if record is None:
        return RunningTask(id=task_id)
    seconds = None if record.started_at is None else max(0.0, now - record.started_at)
    return RunningTask(id=task_id, name=record.name, seconds=seconds)


def _reservation(
    found: Mapping[str, Any], records: Mapping[str, TaskRecord], entry: WorkerEntry, now: float
) -> Reservation | None:
    if not found.get("task"):
        return None
    task = str(found["task"])
    record = records.get(task)
    if record is not None and record.state not in _WAITS:
        return None  # it has begun since: the entry is older than that
    since = record.created_at if record is not None else None
    left = found.get("secondsLeft")
    return Reservation(
        task=task,
        name=record.name if record is not None else "",
        gpus=_texts(found.get("gpus")) or (),
        seconds=None if since is None else max(0.0, now - since),
        queue=str(found.get("queue") or ""),
        asked=_asked(record),
        seconds_left=left - (entry.seen_seconds or 0.0) if isinstance(left, int | float) else None,
    )


def _asked(record: TaskRecord | None) -> Requirement | None:
    try:
        return Requirement.from_dict(record.requirement) if record is not None and record.requirement else None
    except UNREADABLE:
        return None  # of a newer version


def _gpu_problems(load: Mapping[str, Any]) -> tuple[str, ...]:
    """Return why GPUs of a machine cannot be used, as another machine has written it, each in one line."""
    told = (load.get("driverProblem"), *(_texts(load.get("gpuProblems")) or ()))
    return tuple(one_line(text) for text in told if isinstance(text, str) and text)


def _record_schema(load: Mapping[str, Any]) -> int | None:
    number = _mapping(load.get("protocol")).get("record")
    return number if isinstance(number, int) else None


def _limits(load: Mapping[str, Any]) -> tuple[str, str] | None:
    told = _mapping(load.get("limits"))
    return (str(told["by"]), str(told.get("why") or "")) if told.get("by") else None


def _texts(value: object) -> tuple[str, ...] | None:
    return tuple(str(one) for one in value) if isinstance(value, Sequence) and not isinstance(value, str) else None


def _amounts(value: object) -> dict[str, int]:
    return {str(uuid): int(mib) for uuid, mib in _mapping(value).items()}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
