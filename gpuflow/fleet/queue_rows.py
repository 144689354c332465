"""Every queue of a fleet: what it asks for, what waits, what runs, and who serves it. Read-only.

Used by `gpuflow queues` and by the gateway.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import redis

from gpuflow.broker.keys import Keys
from gpuflow.broker.leases import held_leases
from gpuflow.broker.priorities import list_keys, queue_of
from gpuflow.fleet.registry import Fleet
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES


def queue_rows(client: redis.Redis, keys: Keys, plain_queue: str) -> list[dict[str, Any]]:
    """Return every queue with its requirement (None: a plain Celery queue), depth, running tasks and the workers that
    may be counted on and take work, without those whose entries cannot be read. `plain_queue` is that of plain Celery
    tasks. Raises redis errors.
    """
    fleet = Fleet(client, keys)
    registered = fleet.queues()
    workers = [worker for worker in fleet.readable()[0] if worker.is_there and worker.takes_work]
    serving = fleet.serving_classes(list(registered), workers)
    running: Counter[str] = Counter()
    lost: Counter[str] = Counter()  # they wait, but for a sweep
    for list_key, is_live in held_leases(client, keys):
        (running if is_live else lost)[queue_of(list_key.removeprefix(keys.prefix))] += 1
    rows = []
    for name in [*registered, CONTROL_QUEUE, *NOTICE_QUEUES, plain_queue]:
        pipe = client.pipeline(transaction=False)
        for key in list_keys([name]):
            pipe.llen(f"{keys.prefix}{key}")
        rows.append(
            {
                "name": name,
                "requirement": registered.get(name),
                "waiting": sum(pipe.execute()) + lost[name],
                "running": running[name],
                "workers": [
                    worker.id
                    for worker in workers
                    if name in worker.queues or worker.class_name in serving.get(name, ())
                ],
            }
        )
    return rows
