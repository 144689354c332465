"""Reads all that the metrics tell of a fleet, in five round trips; a few more where models are served. Read-only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

from gpuflow.broker.depths import read_depths
from gpuflow.broker.held_messages import leases_of
from gpuflow.broker.keys import RECONCILED_AT, Keys
from gpuflow.fleet.registry import Fleet, WorkerEntry
from gpuflow.fleet.standing import takes_new
from gpuflow.fleet.worker_classes import serving_classes
from gpuflow.ledger.ledger import Ledger
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES
from gpuflow.routing.queue_names import is_demand_queue
from gpuflow.serving.replicas import ServedStatus, statuses


@dataclass(frozen=True, kw_only=True)
class QueueReading:
    """A queue: how many tasks wait and run, how long the oldest has waited (seconds), how many workers serve it."""

    name: str
    waiting: int
    running: int
    oldest_seconds: float
    workers: int


@dataclass(frozen=True, kw_only=True)
class Readings:
    """One look at a fleet. `info` is what the server tells of itself, empty where this login may not ask."""

    now: float
    counts: Mapping[str, str]
    merge: Mapping[str, str]
    scaling: Mapping[str, str]
    repairs: Mapping[str, str]
    merge_kept: int
    unfinished: int
    delayed: int
    dead: int
    unreadable: int
    leases: int
    lost_leases: int
    is_led: bool
    machines: tuple[Mapping[str, Any], ...]
    workers: tuple[WorkerEntry, ...]
    queues: tuple[QueueReading, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    #: Entries of workers that this version cannot read; they are in nothing else.
    unreadable_workers: int = 0
    served: tuple[ServedStatus, ...] = ()

    @property
    def reconciled_at(self) -> float:
        """When the reconciler ran last, in Unix seconds; 0: never."""
        return float(self.counts.get(RECONCILED_AT) or 0)


def read(client: Any, keys: Keys, plain_queue: str) -> Readings:
    """Read the fleet; `client` must decode, `plain_queue` is that of plain Celery tasks. Raises redis errors."""
    pipe = client.pipeline(transaction=False)
    pipe.time()
    for key in (keys.metrics, keys.merge, keys.scaling, keys.repairs, keys.machines, keys.owners):
        pipe.hgetall(key)
    for key in (keys.merge_results, keys.delayed, keys.dead):
        pipe.zcard(key)
    pipe.scard(keys.unfinished)
    pipe.llen(keys.unreadable)
    pipe.zrange(keys.leases, 0, -1, withscores=True)
    pipe.hget(keys.scaling_leader, "until")
    pipe.info()
    answers = pipe.execute(raise_on_error=False)
    *answers, info = answers
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    (seconds, micros), counts, merge, scaling, repairs, machines, owners, kept, delayed, dead, *rest = answers
    unfinished, unreadable, ends, led_until = rest
    if isinstance(info, Exception):
        if not isinstance(info, ResponseError):
            raise info
        info = {}  # this login may not ask
    now = seconds + micros / 1e6
    readable, others = Fleet(client, keys).readable()
    workers = tuple(readable)
    held = leases_of(owners, ends, now, keys.prefix)
    running = Counter(lease.queue for lease in held if lease.is_live)
    lost = Counter(lease.queue for lease in held if not lease.is_live)
    return Readings(
        now=now,
        counts=counts,
        merge=merge,
        scaling=scaling,
        repairs=repairs,
        merge_kept=kept,
        unfinished=unfinished,
        delayed=delayed,
        dead=dead,
        unreadable=unreadable,
        leases=running.total(),
        lost_leases=lost.total(),
        is_led=float(led_until or 0) > now,
        machines=tuple(json.loads(text) for text in machines.values()),
        workers=workers,
        queues=_queues(client, keys, plain_queue, workers, running, lost),
        info=info,
        unreadable_workers=len(others),
        served=tuple(statuses(Ledger(client, keys))),
    )


def _queues(
    client: Any,
    keys: Keys,
    plain_queue: str,
    workers: tuple[WorkerEntry, ...],
    running: Counter[str],
    lost: Counter[str],
) -> tuple[QueueReading, ...]:
    """Return every queue in which something waits or runs, and those that are always there."""
    named = {CONTROL_QUEUE, *NOTICE_QUEUES, plain_queue, *running, *lost}
    named |= {queue for worker in workers for queue in worker.queues if not is_demand_queue(queue)}
    queues = read_depths(client, keys, named).queues
    able = [worker for worker in workers if takes_new(worker)]
    present = [worker for worker in workers if worker.is_there]
    serving = serving_classes(able, {one.name: one.requirement or None for one in queues if is_demand_queue(one.name)})
    by_class = Counter(worker.class_name for worker in able)
    by_name = Counter(queue for worker in able for queue in set(worker.queues) if not is_demand_queue(queue))
    found = []
    for queue in queues:
        name = queue.name
        served_by = sum(by_class[one] for one in serving.get(name, ())) if is_demand_queue(name) else by_name[name]
        if name in (CONTROL_QUEUE, *NOTICE_QUEUES):
            served_by = len(present)
        found.append(
            QueueReading(
                name=name,
                waiting=queue.depth + lost[name],
                running=running[name],
                oldest_seconds=queue.oldest_seconds or 0.0,
                workers=served_by,
            )
        )
    return tuple(found)
