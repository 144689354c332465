"""Whose results a task gets is asked of the broker: one that is away fails no task."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Ignore
from redis.exceptions import ConnectionError as BrokerAway

from gpuflow.worker.steps import until_answered
from gpuflow.worker.task_owner import TaskOwner


class Away:
    """Records of a broker that is away for a few calls."""

    def __init__(self, owners: dict[str, str], failing: int) -> None:
        self.owners, self.failing = owners, failing
        self.asked: list[str] = []

    def find_many(self, ids: Sequence[str]) -> list[Any]:
        self.failing -= 1
        if self.failing >= 0:
            raise BrokerAway("away")
        self.asked += ids
        return [SimpleNamespace(id=id, owner=self.owners[id]) if id in self.owners else None for id in ids]


class Lease:
    held, is_stopping = True, False

    def holds(self, tag: str) -> bool:
        return self.held

    def wait(self, seconds: float) -> None:
        pass


def owner(ledger: Away, lease: Lease) -> TaskOwner:
    runtime: Any = SimpleNamespace(leases=lease, app=SimpleNamespace(signer=None, ledger=ledger))
    told = partial(until_answered, runtime.leases, "tag", "mine")
    return TaskOwner(runtime, SimpleNamespace(id="mine"), told)


def test_a_broker_that_is_away_is_waited_for() -> None:
    many = [f"t{number}" for number in range(200)]
    ledger = Away({"mine": "ann", "theirs": "bob", **dict.fromkeys(many, "ann")}, failing=3)

    found = owner(ledger, Lease()).of_the_same([*many, "theirs", "nobodys"], lambda: True)

    assert found == set(many)
    assert ledger.asked.count("mine") == 1


def test_it_is_not_waited_for_when_nobody_wants_the_answer() -> None:
    left = [True, True]
    assert (
        owner(Away({"mine": "ann"}, failing=10**9), Lease()).of_the_same(["t"], lambda: bool(left and left.pop()))
        == set()
    )


def test_an_attempt_that_has_lost_its_lease_leaves_no_trace() -> None:
    lease = Lease()
    lease.held = False
    with pytest.raises(Ignore):
        owner(Away({"mine": "ann"}, failing=1), lease).of_the_same(["t"], lambda: True)


def test_a_worker_that_stops_at_once_waits_for_no_broker() -> None:
    lease = Lease()
    lease.is_stopping = True
    with pytest.raises(Ignore):
        owner(Away({"mine": "ann"}, failing=10**9), lease).of_the_same(["t"], lambda: True)


def test_a_task_without_a_record_gets_nothing() -> None:
    assert owner(Away({"t": ""}, failing=0), Lease()).of_the_same(["t", "mine"], lambda: True) == set()
