"""How a test pops by the Lua step alone, begins an attempt, and takes a lease away."""

from __future__ import annotations

import json
import uuid
from typing import Any

from gpuflow.broker.gate import MessageFilter
from gpuflow.broker.keys import Keys
from gpuflow.broker.lease_table import LeaseTable
from gpuflow.broker.look import Look
from gpuflow.broker.scripts import broker_script
from gpuflow.ledger.ledger import Holder
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually

_LEASE_SECONDS = 600.0
#: The next message of one plain queue.
POP_ONE = Look(queues=["queue"], plain=["queue"]).to_json([], MessageFilter(), 0)


def lose(keys: Keys, client: Any, tag: str) -> None:
    """End a lease and sweep it, as when its owner was stopped for long."""
    sweeper = LeaseTable(keys, 600.0, owner="sweeper").sweeper
    sweeper.rest_seconds = 0.0

    def swept() -> bool:
        client.zadd(keys.leases, {tag: 1})
        return sweeper.sweep(client).restored == 1

    eventually(swept, what="a sweep that gives no grace")


def begin(fleet: TestFleet, owner: str) -> tuple[Holder, str]:
    """Take the waiting message as this process and start its task; return the attempt and the delivery tag."""
    keys, client = fleet.app.keys, fleet.broker.client
    table = LeaseTable(keys, _LEASE_SECONDS, owner=owner)
    table.connect(client, keep=False)
    table.sweeper.sweep(client)
    names = [keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep, table.bell]
    taken = broker_script("pop")(client, [*names, f"{keys.prefix}cpu"], [owner, _LEASE_SECONDS, POP_ONE])
    message = json.loads(taken[1])
    tag = message["properties"]["delivery_tag"]
    task, call = message["headers"]["id"], uuid.uuid4().hex
    call_of_it = {"owner_token": owner, "tag": tag, "call": call, "returned": taken[5]}
    started = fleet.app.ledger.start(task, worker=owner, **call_of_it)
    assert started.verdict == "begin"
    # The same step again, as its answer may be lost on the way, begins nothing again.
    assert fleet.app.ledger.start(task, worker=owner, **call_of_it) == started
    return Holder(attempt=started.attempt, token=owner), tag
