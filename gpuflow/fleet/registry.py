"""The registry of workers in Redis: who is there, what each can do, and how it is.

A worker writes its own entry (`announce`, `beat`, `leave`); everyone reads. A worker whose heartbeat key has expired
is OFFLINE, whatever its hash says, and one that has missed its last heartbeat is SILENT: nobody counts on it. How old
a heartbeat is follows from what its key has left, so no machine's clock is asked.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import redis
from redis.exceptions import ResponseError

from gpuflow.audit.actors import actor_here
from gpuflow.audit.entries import REPEAT_SECONDS, audit_preamble, record
from gpuflow.broker.held_messages import live_leases
from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import Script, broker_script, load_script, script_text
from gpuflow.errors import GPUFlowError
from gpuflow.fleet.desired import AUTOMATIC, MANUAL, MOST_DECISIONS, Desired, DesiredState
from gpuflow.fleet.worker_classes import serving_classes
from gpuflow.ledger.ledger import Ledger
from gpuflow.routing.capability import CAPABILITY_SCHEMA, Capability

#: Schema number of a worker entry and its heartbeat.
WORKER_SCHEMA: Final = 1
#: A worker is SILENT when its heartbeat is overdue by this share of its interval, and by so many seconds.
OVERDUE_SHARE: Final = 0.5
OVERDUE_SECONDS: Final = 5.0
#: When no beat has led for so many seconds, three of its longest terms, what the autoscaler disabled is enabled.
FORSAKEN_SECONDS: Final = 45.0


#: What the audit log calls the change of what a worker is to be, and who acts when the autoscaler does.
_ACTIONS: Final = {
    DesiredState.ENABLED: "worker.enable",
    DesiredState.DISABLED: "worker.disable",
    DesiredState.DRAINING: "worker.drain",
    DesiredState.RETIRED: "worker.retire",
}
AUTOSCALER: Final = "autoscaler"
#: What reading an entry raises that has a form which this gpuflow does not know: another machine has written it.
UNREADABLE: Final = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    GPUFlowError,
)


class WorkerState(StrEnum):
    """Life of a worker."""

    CONNECTING = "CONNECTING"
    IDLE = "IDLE"
    BUSY = "BUSY"
    DRAINING = "DRAINING"
    SILENT = "SILENT"
    OFFLINE = "OFFLINE"


@dataclass(frozen=True, kw_only=True)
class WorkerEntry:
    """One worker as others see it. Times are Unix seconds on the worker's clock.

    `interval_seconds` and `timeout_seconds` are those of its heartbeats, `seen_seconds` how long ago the last one was
    by the server's clock; None: it is OFFLINE, or of a version that did not tell. `stopped`: it has said itself that it
    ends, so that nobody lost it. One that is OFFLINE runs no `tasks`, whatever it said last: they have ended, or are
    taken from it when their leases end. Of one that is SILENT see `Fleet.as_seen`.
    """

    id: str
    state: WorkerState
    stopped: bool = False
    hostname: str = ""
    node: str = ""
    pid: int = 0
    #: What its process is, on its machine: see `worker.preflight.own_process`; "": not known.
    process: str = ""
    enabled: bool = True
    ephemeral: bool = False
    capability: Mapping[str, Any] = field(default_factory=dict)
    queues: tuple[str, ...] = ()
    class_name: str = ""
    tasks: tuple[str, ...] = ()
    load: Mapping[str, Any] = field(default_factory=dict)
    #: The cap on its transfers of artifacts; None: no cap.
    bandwidth_bytes_per_second: int | None = None
    started_at: float = 0.0
    heartbeat_at: float = 0.0
    interval_seconds: float = 0.0
    timeout_seconds: float = 0.0
    seen_seconds: float | None = None
    #: When it was read, in Unix seconds on the server's clock; None: not known.
    read_at: float | None = None
    #: How far its clock is ahead of the server's, in seconds; None: not known.
    skew_seconds: float | None = None
    version: str = ""
    schema: int = WORKER_SCHEMA
    #: What it is to be, as it stands in Redis; `enabled` is what it follows.
    desired: Desired = field(default_factory=Desired)

    @property
    def takes_work(self) -> bool:
        """Whether it takes work, and is to."""
        return self.enabled and self.desired.state is not DesiredState.DISABLED

    @property
    def is_gone(self) -> bool:
        """Whether it has gone."""
        return self.state is WorkerState.OFFLINE

    @property
    def is_there(self) -> bool:
        """Whether somebody may count on it: it is neither gone nor SILENT."""
        return self.state not in (WorkerState.OFFLINE, WorkerState.SILENT)

    @property
    def drains(self) -> bool:
        """Whether it drains, or is to."""
        return not self.is_gone and (self.state is WorkerState.DRAINING or self.desired.ends)

    def to_hash(self) -> dict[str, str]:
        """Return the entry as Redis hash fields; `newer_load` begins anew."""
        return {
            "schema": str(self.schema),
            "id": self.id,
            "state": str(self.state),
            "stopped": "1" if self.stopped else "0",
            "hostname": self.hostname,
            "node": self.node,
            "pid": str(self.pid),
            "process": self.process,
            "enabled": "1" if self.enabled else "0",
            "ephemeral": "1" if self.ephemeral else "0",
            "capability": json.dumps(self.capability),
            "queues": json.dumps(self.queues),
            "class": self.class_name,
            "tasks": json.dumps(self.tasks),
            "load": json.dumps(self.load),
            "newer_load": "",
            "bandwidth_bytes_per_second": str(self.bandwidth_bytes_per_second or ""),
            "started_at": str(self.started_at),
            "heartbeat_at": str(self.heartbeat_at),
            "interval_seconds": str(self.interval_seconds),
            "timeout_seconds": str(self.timeout_seconds),
            "version": self.version,
        }

    @classmethod
    def from_hash(cls, raw: Mapping[str, str], *, left_ms: int, now: float | None = None) -> WorkerEntry:
        """Read an entry. `left_ms`: when its heartbeat expires, in milliseconds; below 0: it has. `now`: Unix seconds
        on the server's clock."""
        newer = _newer_load(raw)
        interval, timeout = (float(raw.get(f"{name}_seconds") or 0) for name in ("interval", "timeout"))
        seen = max(0.0, timeout - left_ms / 1000) if timeout and left_ms >= 0 else None
        state = WorkerState(raw["state"]) if left_ms >= 0 else WorkerState.OFFLINE
        if state is WorkerState.IDLE and newer.get("jobs"):
            state = WorkerState.BUSY
        heartbeat = float(raw.get("heartbeat_at", "0"))
        overdue = (seen or 0.0) - interval
        if state is not WorkerState.OFFLINE and overdue > max(OVERDUE_SECONDS, OVERDUE_SHARE * interval):
            state = WorkerState.SILENT
        load = {**json.loads(raw.get("load") or "{}"), **newer}
        tasks = tuple(json.loads(raw.get("tasks") or "[]"))
        if state is WorkerState.OFFLINE:
            tasks = ()
            load |= {"jobs": 0} if "jobs" in load else {}
        return cls(
            id=raw["id"],
            state=state,
            # Of a version that did not say, it is believed that it has stopped.
            stopped=raw["state"] == WorkerState.OFFLINE and raw.get("stopped", "1") == "1",
            hostname=raw.get("hostname", ""),
            node=raw.get("node", ""),
            pid=int(raw.get("pid", "0")),
            process=raw.get("process", ""),
            enabled=raw.get("enabled", "1") == "1",
            ephemeral=raw.get("ephemeral") == "1",
            capability=json.loads(raw.get("capability") or "{}"),
            queues=tuple(json.loads(raw.get("queues") or "[]")),
            class_name=raw.get("class", ""),
            tasks=tasks,
            load=load,
            bandwidth_bytes_per_second=int(raw.get("bandwidth_bytes_per_second") or 0) or None,
            started_at=float(raw.get("started_at", "0")),
            heartbeat_at=heartbeat,
            interval_seconds=interval,
            timeout_seconds=timeout,
            seen_seconds=seen,
            read_at=now,
            skew_seconds=None if now is None or seen is None or not heartbeat else heartbeat - (now - seen),
            version=raw.get("version", ""),
            schema=int(raw.get("schema", WORKER_SCHEMA)),
            desired=Desired.from_hash(raw),
        )

    def public(self) -> dict[str, Any]:
        """Return what users see, JSON-able."""
        return {
            "id": self.id,
            "state": str(self.state),
            "enabled": self.takes_work,
            "desired": self.desired.public(),
            "ephemeral": self.ephemeral,
            "hostname": self.hostname,
            "node": self.node,
            "pid": self.pid,
            "capability": dict(self.capability),
            "queues": list(self.queues),
            "tasks": list(self.tasks),
            "load": dict(self.load),
            "bandwidthBytesPerSecond": self.bandwidth_bytes_per_second,
            "startedAt": self.started_at,
            "heartbeatAt": self.heartbeat_at,
            "seenSecondsAgo": None if self.seen_seconds is None else round(self.seen_seconds, 1),
            "clockAheadSeconds": None if self.skew_seconds is None else round(self.skew_seconds, 1),
            "version": self.version,
        }


def _newer_load(raw: Mapping[str, str]) -> dict[str, Any]:
    """Return what the running process of an entry has noted since; nothing where the note is not one of it."""
    try:
        note = json.loads(raw.get("newer_load") or "{}")
        ours = note["startedAt"] == float(raw["started_at"])
        return dict(note["load"]) if ours else {}
    except (ValueError, TypeError, KeyError):
        return {}


def _readable(raw: Mapping[str, str], left_ms: int, now: float) -> WorkerEntry | None:
    """Return an entry; None for one of another form, such as that of a newer version."""
    try:
        entry = WorkerEntry.from_hash(raw, left_ms=left_ms, now=now)
        able = Capability.from_dict({**entry.capability, "schema": CAPABILITY_SCHEMA})
    except UNREADABLE:
        return None
    numbers = [able.cpu_count, able.memory_mib, able.disk_free_mib or 0, able.disk_floor_mib]
    numbers += [number for gpu in able.gpus for number in (gpu.vram_gb, gpu.total_mib)]
    families = entry.load.get("families") or []
    texts = [*entry.queues, *entry.tasks, *(text for gpu in able.gpus for text in (gpu.uuid, *gpu.names))]
    well_formed = isinstance(families, list) and all(isinstance(text, str) for text in texts)
    return entry if well_formed and all(isinstance(number, int | float) for number in numbers) else None


def _holding(entry: WorkerEntry, owners: Mapping[str, str]) -> WorkerEntry:
    """Return an entry without the tasks that another owner holds, or nobody; `owners` are tokens by task."""
    prefix = f"{entry.id}:"
    return replace(entry, tasks=tuple(task for task in entry.tasks if owners.get(task, prefix).startswith(prefix)))


class Fleet:
    """Reads and writes worker entries; `client` must decode responses."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client: Any = client
        self.keys = keys

    def announce(self, entry: WorkerEntry) -> None:
        """Write a whole entry and its heartbeat, which lives for its `timeout_seconds`."""
        pipe = self.client.pipeline()
        pipe.hset(self.keys.worker(entry.id), mapping=entry.to_hash())
        pipe.sadd(self.keys.workers, entry.id)
        pipe.set(self.keys.heartbeat(entry.id), WORKER_SCHEMA, px=int(entry.timeout_seconds * 1000))
        pipe.execute()

    def note_load(self, worker_id: str, started_at: float, load: Mapping[str, Any]) -> None:
        """Write what of a worker's load has changed since its entry was written; the next entry takes its place.

        `started_at` is the entry's: what an earlier process of the same id has left counts for nobody.
        """
        note = json.dumps({"startedAt": started_at, "load": load})
        self.client.hset(self.keys.worker(worker_id), "newer_load", note)

    def leave(self, worker_id: str) -> None:
        """Say that a worker has stopped."""
        pipe = self.client.pipeline()
        ended = {"state": "OFFLINE", "stopped": "1", "heartbeat_at": str(time.time())}
        pipe.hset(self.keys.worker(worker_id), mapping=ended)
        pipe.delete(self.keys.heartbeat(worker_id))
        pipe.execute()

    def note_silent(self) -> list[str]:
        """Write OFFLINE into the entries of workers whose heartbeat has expired; return their ids."""
        ids = self.ids()
        keys = [key for worker_id in ids for key in (self.keys.worker(worker_id), self.keys.heartbeat(worker_id))]
        return [ids[int(place)] for place in load_script("gpuflow.fleet", "silent")(self.client, keys, [])]

    def forget_gone(self, ephemeral_seconds: float, persistent_seconds: float) -> list[str]:
        """Delete the entries of workers that have been OFFLINE for so long; return their ids."""
        now = time.time()
        gone = [
            entry.id
            for entry in self.workers()
            if entry.is_gone
            and now - entry.heartbeat_at > (ephemeral_seconds if entry.ephemeral else persistent_seconds)
        ]
        for worker_id in gone:
            self.forget(worker_id)
        return gone

    def forget(self, worker_id: str) -> None:
        """Delete the entry of a worker."""
        pipe = self.client.pipeline()
        pipe.srem(self.keys.workers, worker_id)
        pipe.delete(self.keys.worker(worker_id), self.keys.heartbeat(worker_id))
        pipe.execute()

    def desire(
        self,
        worker_id: str,
        state: DesiredState,
        *,
        by: str = MANUAL,
        reason: str = "",
        deadline_seconds: float | None = None,
        leader: tuple[str, int] = ("", 0),
        decision: str = "",
        action: str = "",
    ) -> str:
        """Write what a worker is to be, in one step; return what became of it (lua/desire.lua).

        `leader` is the name and epoch of the beat that scales; `action` what the audit log calls it, '' for the name of
        the state. Raises redis errors.
        """
        keys = [self.keys.worker(worker_id), self.keys.heartbeat(worker_id)]
        until = "" if deadline_seconds is None else deadline_seconds
        step = load_script("gpuflow.fleet", "desire", audit_preamble() + script_text("gpuflow.fleet", "fence"))
        actor = AUTOSCALER if by == AUTOMATIC else actor_here()
        arguments = [str(state), by, reason, until, *leader, decision, MOST_DECISIONS]
        arguments += [worker_id, actor, action or _ACTIONS[state], uuid.uuid4().hex]
        keys += [self.keys.scaling_leader, self.keys.scaling_decisions, self.keys.audit]
        return str(step(self.client, keys, arguments))

    def ask_to_drain(self, worker_id: str, deadline_seconds: float | None) -> None:
        """Let a worker drain; it follows at its next heartbeat at the latest."""
        self.desire(worker_id, DesiredState.DRAINING, reason="asked for", deadline_seconds=deadline_seconds)

    def release(self, worker_id: str) -> str:
        """Leave a worker to the autoscaler again: it is enabled until that decides otherwise."""
        key = self.keys.worker(worker_id)
        if self.client.hget(key, "desired") == DesiredState.DISABLED:
            answer = self.desire(worker_id, DesiredState.ENABLED, reason="released by hand", action="worker.release")
            if answer not in ("written", "same"):
                return answer
        else:
            record(self.client, self.keys, "worker.release", f"worker:{worker_id}")
        self.client.hset(key, "desired_by", AUTOMATIC)
        return "written"

    def order(self, worker_id: str) -> tuple[Desired, float | None]:
        """Return what a worker is to be, and the seconds left for a drain (None: no deadline)."""
        step = _automatic_step("order")
        found = step(self.client, [self.keys.worker(worker_id), self.keys.scaling_leader], [FORSAKEN_SECONDS])
        *texts, left = map(str, found)
        names = ("desired", "desired_by", "desired_reason", "desired_at", "wanted")
        desired = Desired.from_hash(dict(zip(names, texts, strict=True)))
        return desired, float(left) if desired.ends and left else None

    def begin_anew(self, worker_id: str, hostname: str = "", version: str = "") -> None:
        """Begin a new life of a worker: a drain is over, and what the autoscaler wanted; what is by hand stands.

        The audit log gets its registration, or that it is refused.
        """
        keys = [self.keys.worker(worker_id), self.keys.audit, self.keys.audit_sent(uuid.uuid4().hex)]
        _automatic_step("begin_anew")(self.client, keys, [worker_id, REPEAT_SECONDS, hostname, version])

    def release_forsaken(self) -> int:
        """Enable the workers that the autoscaler has disabled; return how many, -1 while a beat leads."""
        workers = [self.keys.worker(worker_id) for worker_id in self.ids()]
        return int(_automatic_step("release_forsaken")(self.client, [self.keys.scaling_leader, *workers], []))

    def find(self, worker_id: str) -> WorkerEntry | None:
        """Return one worker, or None."""
        pipe = self.client.pipeline(transaction=False)
        pipe.time()
        pipe.hgetall(self.keys.worker(worker_id))
        pipe.pttl(self.keys.heartbeat(worker_id))
        (seconds, micros), raw, left = pipe.execute()
        if not raw.get("state"):
            return None
        return WorkerEntry.from_hash(raw, left_ms=left, now=seconds + micros / 1e6)

    def last_tasks(self, worker_id: str) -> list[str]:
        """Return the tasks that a worker, there or not, has said last it runs; their records say whether it does."""
        raw = self.client.hget(self.keys.worker(worker_id), "tasks")
        return [str(task) for task in json.loads(raw or "[]")]

    def ids(self) -> list[str]:
        """Return the ids of all known workers."""
        return sorted(self.client.smembers(self.keys.workers))

    def workers(self) -> list[WorkerEntry]:
        """Return the known workers whose entries this version can read, by id."""
        return self.readable()[0]

    def readable(self) -> tuple[list[WorkerEntry], list[str]]:
        """Return the workers whose entries this version can read, and the ids of the others."""
        found = [(worker_id, _readable(raw, left, now)) for worker_id, raw, left, now in self._entries()]
        there = [entry for _, entry in found if entry is not None]
        return there, [worker_id for worker_id, entry in found if entry is None]

    def as_seen(self, entries: Sequence[WorkerEntry]) -> list[WorkerEntry]:
        """Return entries as people are to see them: a worker that is SILENT runs what it holds, whatever it said last.

        A call without a record is told by nobody else, and stays. Raises redis errors.
        """
        silent = [entry for entry in entries if entry.state is WorkerState.SILENT and entry.tasks]
        if not silent:
            return list(entries)
        try:
            ids = sorted({task for entry in silent for task in entry.tasks})
            heads = [record for record in Ledger(self.client, self.keys).heads(ids) if record is not None]
            live = live_leases(self.client, self.keys, [record.tag for record in heads if record.tag])
        except (*UNREADABLE, ResponseError):
            return list(entries)  # one task that cannot be read hides no worker
        owners = {record.id: live.get(record.tag or "", "") for record in heads}
        return [_holding(entry, owners) if entry.state is WorkerState.SILENT else entry for entry in entries]

    def _entries(self) -> list[tuple[str, Mapping[str, str], int, float]]:
        """Return id, hash, milliseconds until the heartbeat expires, and the server's time then, of all workers."""
        ids = self.ids()
        pipe = self.client.pipeline(transaction=False)
        pipe.time()
        for worker_id in ids:
            pipe.hgetall(self.keys.worker(worker_id))
            pipe.pttl(self.keys.heartbeat(worker_id))
        (seconds, micros), *answers = pipe.execute()
        found = zip(ids, answers[::2], answers[1::2], strict=True)
        return [(worker_id, raw, left, seconds + micros / 1e6) for worker_id, raw, left in found if raw.get("state")]

    def capabilities(self) -> list[Capability]:
        """Return what each worker can do that may be counted on."""
        there = [entry.capability for entry in self.workers() if entry.is_there and entry.capability]
        return [Capability.from_dict({**capability, "schema": CAPABILITY_SCHEMA}) for capability in there]

    def serves_beside(self, worker_id: str, queue: str) -> bool:
        """Whether a worker other than `worker_id` is there to take tasks of `queue`, and is to stay."""
        there = [
            entry
            for entry in self.workers()
            if entry.id != worker_id
            and entry.takes_work
            and not entry.drains
            and entry.state in (WorkerState.IDLE, WorkerState.BUSY)
        ]
        classes = self.serving_classes([queue], there)[queue]
        return any(queue in entry.queues or entry.class_name in classes for entry in there)

    def serving_classes(self, queues: Sequence[str], entries: Iterable[WorkerEntry]) -> dict[str, set[str]]:
        """Return the classes of these workers that serve each of the demand queues."""
        pipe = self.client.pipeline(transaction=False)
        for queue in queues:
            pipe.hget(self.keys.queue(queue), "requirement")
        return serving_classes(entries, dict(zip(queues, pipe.execute(), strict=True)))

    def forget_queues(self, in_use: Collection[str], unused_seconds: float) -> list[str]:
        """Forget the demand queues that nothing was published to for so long and no record `in_use` names."""
        forgotten = []
        for name in sorted(set(self.client.smembers(self.keys.queues)).difference(in_use)):
            keys = [self.keys.ready, self.keys.queues, self.keys.queue(name), self.keys.queue_classes(name)]
            if broker_script("forget_queue")(self.client, keys, [name, unused_seconds]):
                forgotten.append(name)
        return forgotten

    def forget_classes(self) -> list[str]:
        """Forget the classes that no worker is of any more; return them."""
        known = {raw.get("class", "") for _, raw, _, _ in self._entries()}
        gone = set(self.client.smembers(self.keys.classes)).difference(known)
        if not gone:
            return []
        pipe = self.client.pipeline(transaction=False)
        pipe.srem(self.keys.classes, *gone)
        pipe.delete(*map(self.keys.waiters, gone))
        for queue in self.client.smembers(self.keys.queues):
            pipe.zrem(self.keys.queue_classes(queue), *gone)
        pipe.execute()
        return sorted(gone)

    def has_gpu(self) -> bool:
        """Whether a live worker has a GPU."""
        return any(capability.gpus for capability in self.capabilities())

    def queues(self) -> dict[str, dict[str, Any]]:
        """Return every registered demand queue with its requirement."""
        names = sorted(self.client.smembers(self.keys.queues))
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hget(self.keys.queue(name), "requirement")
        return {name: json.loads(raw or "{}") for name, raw in zip(names, pipe.execute(), strict=True)}


def _automatic_step(name: str) -> Script:
    return load_script("gpuflow.fleet", name, audit_preamble() + script_text("gpuflow.fleet", "automatic"))
