"""Every queue of a fleet: what it asks for, what waits and how long, what runs, and who serves it. Read-only.

Used by `gpuflow queues`, by the gateway and by the monitor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import redis

from gpuflow.broker.depths import read_depths
from gpuflow.broker.held_messages import held_leases
from gpuflow.broker.keys import Keys
from gpuflow.fleet.registry import Fleet, WorkerEntry
from gpuflow.fleet.standing import takes_new
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES


def queue_rows(
    client: redis.Redis, keys: Keys, plain_queue: str, entries: Sequence[WorkerEntry] | None = None
) -> list[dict[str, Any]]:
    """Return every queue with its requirement (None: a plain Celery queue), depth, `oldestAt` (when its oldest message
    was sent, Unix seconds; None: nothing waits), running tasks and the workers that take new work (`standing`), without
    those whose entries cannot be read. `plain_queue` is that of plain Celery tasks, `entries` are the workers where
    they have been read already. Raises redis errors.
    """
    fleet = Fleet(client, keys)
    registered = fleet.queues()
    entries = fleet.workers() if entries is None else entries
    workers = [worker for worker in entries if takes_new(worker)]
    serving = fleet.serving_classes(list(registered), workers)
    running: Counter[str] = Counter()
    lost: Counter[str] = Counter()  # they wait, but for a sweep
    for lease in held_leases(client, keys):
        (running if lease.is_live else lost)[lease.queue] += 1
    names = [*registered, CONTROL_QUEUE, *NOTICE_QUEUES, plain_queue]
    waits = read_depths(client, keys, names)
    depths = {queue.name: queue for queue in waits.queues}
    return [
        {
            "name": name,
            "requirement": registered.get(name),
            "waiting": depths[name].depth + lost[name],
            "oldestAt": None if (age := depths[name].oldest_seconds) is None else round(waits.now - age, 3),
            "running": running[name],
            "workers": [
                worker.id for worker in workers if name in worker.queues or worker.class_name in serving.get(name, ())
            ],
        }
        for name in names
    ]
