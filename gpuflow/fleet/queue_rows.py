"""Every queue of a fleet: what it asks for, what waits, what runs, and who serves it. Read-only.

Used by `gpuflow queues` and by the gateway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import redis

from gpuflow.broker.keys import Keys
from gpuflow.broker.leases import held_leases
from gpuflow.broker.priorities import list_keys, queue_of
from gpuflow.fleet.registry import Fleet, WorkerEntry
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES


def queue_rows(
    client: redis.Redis, keys: Keys, plain_queue: str, entries: Sequence[WorkerEntry] | None = None
) -> list[dict[str, Any]]:
    """Return every queue with its requirement (None: a plain Celery queue), depth, running tasks and the workers that
    may be counted on and take work, without those whose entries cannot be read. `plain_queue` is that of plain Celery
    tasks, `entries` are the workers where they have been read already. Raises redis errors.
    """
    fleet = Fleet(client, keys)
    registered = fleet.queues()
    entries = fleet.readable()[0] if entries is None else entries
    workers = [worker for worker in entries if worker.is_there and worker.takes_work]
    serving = fleet.serving_classes(list(registered), workers)
    running: Counter[str] = Counter()
    lost: Counter[str] = Counter()  # they wait, but for a sweep
    for list_key, is_live in held_leases(client, keys):
        (running if is_live else lost)[queue_of(list_key.removeprefix(keys.prefix))] += 1
    names = [*registered, CONTROL_QUEUE, *NOTICE_QUEUES, plain_queue]
    depths = _depths(client, keys, names)
    return [
        {
            "name": name,
            "requirement": registered.get(name),
            "waiting": depths[name] + lost[name],
            "running": running[name],
            "workers": [
                worker.id for worker in workers if name in worker.queues or worker.class_name in serving.get(name, ())
            ],
        }
        for name in names
    ]


def _depths(client: redis.Redis, keys: Keys, names: Sequence[str]) -> dict[str, int]:
    """Return how many messages wait in each queue, of all priorities."""
    pipe = client.pipeline(transaction=False)
    lists = [(name, key) for name in names for key in list_keys([name])]
    for _, key in lists:
        pipe.llen(f"{keys.prefix}{key}")
    depths = dict.fromkeys(names, 0)
    for (name, _), length in zip(lists, pipe.execute(), strict=True):
        depths[name] += length
    return depths
