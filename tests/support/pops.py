"""How a test pops by the Lua step alone, and takes a lease away."""

from __future__ import annotations

from typing import Any

from gpuflow.broker.gate import Taste
from gpuflow.broker.keys import Keys
from gpuflow.broker.leases import LeaseTable
from gpuflow.broker.look import Look
from tests.support.waiting import eventually

#: The next message of one plain queue.
POP_ONE = Look(queues=["queue"], plain=["queue"]).to_json([], Taste(), 0)


def lose(keys: Keys, client: Any, tag: str) -> None:
    """End a lease and sweep it, as when its owner was stopped for long."""
    sweeper = LeaseTable(keys, 600.0, owner="sweeper").sweeper
    sweeper.rest_seconds = 0.0

    def swept() -> bool:
        client.zadd(keys.leases, {tag: 1})
        return sweeper.sweep(client).restored == 1

    eventually(swept, what="a sweep that gives no grace")
