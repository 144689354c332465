"""Sees the whole fleet as scaling needs it, in four round trips: workers, depths, leases, machines. Read-only."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuflow.broker.depths import QueueDepth, read_depths
from gpuflow.broker.held_messages import held_leases
from gpuflow.broker.keys import Keys
from gpuflow.errors import GPUFlowError
from gpuflow.fleet.registry import Fleet, WorkerEntry
from gpuflow.fleet.worker_views import capability_of
from gpuflow.routing.capability import Capability
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES
from gpuflow.routing.queue_names import is_demand_queue
from gpuflow.routing.queue_parsing import requirement_of
from gpuflow.routing.requirement import Requirement
from gpuflow.scaling.model import Demand, MachineFacts, Snapshot, WorkerFacts
from gpuflow.scaling.store import Machine, ScalingStore

_OURS = (CONTROL_QUEUE, *NOTICE_QUEUES)


class Seen:
    """A snapshot, with what only the autoscaler needs: the server's time, machines, and what each worker holds."""

    def __init__(self, snapshot: Snapshot, now: float, machines: Sequence[Machine], held: Mapping[str, int]) -> None:
        self.snapshot = snapshot
        self.now = now
        self.machines = {machine.id: machine for machine in machines}
        self.workers = {worker.id: worker for worker in snapshot.workers}
        self.held = held


def read(client: Any, keys: Keys, plain_queue: str) -> Seen:
    """Read the fleet; `plain_queue` is that of plain Celery tasks. Raises redis errors."""
    began = time.monotonic()
    known, unreadable = Fleet(client, keys).readable()
    entries = [entry for entry in known if not entry.is_gone]
    leases = [lease for lease in held_leases(client, keys) if lease.queue not in _OURS]
    held = Counter(lease.worker for lease in leases)
    running = Counter(lease.queue for lease in leases if lease.is_live)
    lost = Counter((lease.queue, lease.priority) for lease in leases if not lease.is_live)  # they wait, but for a sweep
    plain = {plain_queue, *(name for entry in entries for name in _plain_queues(entry))}
    waits = read_depths(client, keys, plain | {lease.queue for lease in leases})
    now = waits.now
    store = ScalingStore(client, keys)
    machines, counts = store.machines(), store.counts()
    snapshot = Snapshot(
        workers=(
            *(_worker(entry, held[entry.id], now) for entry in entries),
            *(_unknown(worker_id) for worker_id in unreadable if client.exists(keys.heartbeat(worker_id))),
        ),
        demands=tuple(demand for queue in waits.queues if (demand := _demand(queue, running, lost)) is not None),
        machines=tuple(_machine(machine, now) for machine in machines),
        held_back={
            name.removeprefix("retry_at:"): at - now for name, at in counts.items() if name.startswith("retry_at:")
        },
        age_seconds=time.monotonic() - began,
        gathering=waits.gathering,
    )
    return Seen(snapshot, now, machines, held)


def _plain_queues(entry: WorkerEntry) -> tuple[str, ...]:
    return tuple(name for name in entry.queues if name not in _OURS and not is_demand_queue(name))


def _worker(entry: WorkerEntry, leases: int, now: float) -> WorkerFacts:
    load, desired = entry.load, entry.desired
    families = load.get("families")
    idle = load.get("idleSeconds")
    works = bool(leases or entry.tasks or load.get("jobs"))
    return WorkerFacts(
        id=entry.id,
        capability=_alike(capability_of(entry)),
        alive=entry.is_there,
        enabled=desired.state != "disabled",
        draining=entry.drains,
        by_hand=desired.by_hand,
        ephemeral=entry.ephemeral,
        families=None if families is None else tuple(map(str, families)),
        plain_queues=_plain_queues(entry),
        leases=max(leases, int(works)),
        most_jobs=load["maxJobs"] if isinstance(load.get("maxJobs"), int) else None,
        idle_seconds=None if works or not isinstance(idle, int | float) else idle + (entry.seen_seconds or 0.0),
        toggled_seconds=None if desired.at is None else max(0.0, now - desired.at),
        cost_per_hour=float(load.get("costPerHour") or 0.0),
    )


def _unknown(worker_id: str) -> WorkerFacts:
    """Return a worker of which nothing can be read but that it lives: it serves nothing, and nobody touches it."""
    return WorkerFacts(id=worker_id, capability=Capability(), by_hand=True, families=(), leases=1)


def _alike(capability: Capability) -> Capability:
    """Return the same machine with its GPUs numbered: what fits it fits every machine of its kind."""
    gpus = tuple(replace(gpu, uuid=f"GPU-{number}") for number, gpu in enumerate(capability.gpus))
    return replace(capability, gpus=gpus)


def _demand(queue: QueueDepth, running: Mapping[str, int], lost: Mapping[tuple[str, int], int]) -> Demand | None:
    """Return what a queue asks for; None for a demand queue of which nobody can tell that."""
    asked = _requirement(queue.name, queue.requirement)
    if asked is None and is_demand_queue(queue.name):
        return None
    waiting = Counter(queue.waiting)
    waiting.update({priority: count for (name, priority), count in lost.items() if name == queue.name})
    return Demand(
        queue=queue.name,
        requirement=asked,
        waiting=waiting,
        running=running.get(queue.name, 0),
        oldest_seconds=queue.oldest_seconds or 0.0,
        task_seconds=queue.task_seconds,
    )


def _requirement(name: str, stored: str) -> Requirement | None:
    try:
        return Requirement.from_dict(json.loads(stored)) if stored else requirement_of(name)
    except (GPUFlowError, ValueError, TypeError):
        return None


def _machine(machine: Machine, now: float) -> MachineFacts:
    return MachineFacts(
        id=machine.id,
        family=machine.family,
        state=machine.state,
        age_seconds=max(0.0, now - machine.wanted_at),
        spot=machine.spot,
        cost_per_hour=machine.cost_per_hour,
    )
