"""The ledger and the leases against a model: any order of steps, crashes between any two of them, zombies included.

A process is a token; it "crashes" by doing nothing more, and comes back as a zombie when the machine picks it again.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gpuflow.broker.leases import LeaseTable
from gpuflow.broker.scripts import broker_script
from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.ledger.ledger import Holder
from gpuflow.ledger.states import TaskState
from gpuflow.settings import Settings
from tests.support.fleet import Broker
from tests.support.pops import POP_ONE

pytestmark = pytest.mark.alone

LEASE_SECONDS = 1000.0
#: How many random sequences of steps are tried.
SEQUENCES = int(os.environ.get("LEDGER_SEQUENCES", "150"))
QUEUE = "cpu"
SPEC = {"taskType": "echo", "echo": {"output": 1}}


@dataclass
class Life:
    """What the model knows of one task: the attempt that may commit, and how it has ended."""

    attempt: int = 0
    current: tuple[str, int] | None = None
    state: str = "QUEUED"
    commits: int = 0
    failures: int = 0
    lives: int = 1
    cancel_wanted: bool = False

    def end(self, state: str) -> None:
        self.state, self.current, self.cancel_wanted = state, None, False


@dataclass
class Delivery:
    """A message in the hands of a process, and the attempt that it began there."""

    owner: str
    tag: str
    task: str
    attempt: int | None = None


@dataclass
class World:
    """A real server and app, shared by all runs of the machine."""

    broker: Any = None
    app: Any = None

    @contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        with ExitStack() as stack:  # the last one first
            self.broker = Broker(folder / "broker")
            stack.callback(self.broker.close)
            env = {"REDIS_URL": self.broker.url, "GPUFLOW_LEASE_SEC": str(LEASE_SECONDS)}
            self.app = GPUFlow("gpuflow", settings=Settings.load(env=env, cwd=folder))
            stack.callback(self.app.redis.close)
            stack.callback(self.app.close)
            yield


WORLD = World()


class LedgerMachine(RuleBasedStateMachine):
    tasks = Bundle("tasks")
    deliveries = Bundle("deliveries")
    owners = st.sampled_from(["a:1", "b:1", "c:1"])

    @initialize()
    def empty(self) -> None:
        self.client = WORLD.broker.client
        self.client.flushall()
        self.app = WORLD.app
        self.ledger = self.app.ledger
        self.keys = self.app.keys
        self.lives: dict[str, Life] = {}
        self.tables = {name: self._table(name) for name in ("a:1", "b:1", "c:1")}

    def _table(self, owner: str) -> LeaseTable:
        table = LeaseTable(self.keys, LEASE_SECONDS, owner=owner)
        table.connect(self.client, keep=False)
        table.reclaim = lambda free, new: self.ledger.reclaim(free, owner, LEASE_SECONDS, new_run=new)
        return table

    # -- steps ------------------------------------------------------------------------------------------------------

    @rule(target=tasks)
    def submit(self) -> str:
        task = submit(SPEC, app=self.app)
        self.lives[task.id] = Life()
        return task.id

    @rule(target=deliveries, owner=owners)
    def pop(self, owner: str) -> Any:
        keys, table = self.keys, self.tables[owner]
        names = [keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep, table.bell]
        taken = broker_script("pop")(self.client, [*names, self._list()], [owner, LEASE_SECONDS, POP_ONE])
        if not taken[0]:
            return None
        message = json.loads(taken[1])
        tag = message["properties"]["delivery_tag"]
        table.take(tag, QUEUE, taken[0], taken[1])
        table.start(tag)
        return Delivery(owner=owner, tag=tag, task=message["headers"]["id"])

    @rule(delivery=deliveries)
    def start(self, delivery: Any) -> None:
        if delivery is None:
            return
        life = self.lives[delivery.task]
        holds = self._holds(delivery)
        step = {"worker": "w", "owner_token": delivery.owner, "tag": delivery.tag, "call": uuid.uuid4().hex}
        answer = self.ledger.start(delivery.task, **step)
        again = self.ledger.start(delivery.task, **step)  # as if the answer had been lost
        assert again.verdict == answer.verdict
        assert again.attempt == answer.attempt or answer.verdict != "begin"
        if not holds:
            assert answer.verdict == "lost"
        elif life.state in ("SUCCEEDED", "FAILED", "CANCELLED", "DEAD"):
            assert answer.verdict == "final"
        elif answer.verdict == "begin":
            assert answer.attempt > life.attempt
            assert not life.cancel_wanted
            life.attempt = answer.attempt
            life.current = (delivery.owner, answer.attempt)
            life.state = "RUNNING"
            delivery.attempt = answer.attempt
            self.tables[delivery.owner].begin(delivery.tag, delivery.task, answer.attempt)
        elif life.cancel_wanted:
            assert (answer.verdict, answer.state) == ("final", "CANCELLED")
            life.end("CANCELLED")
        else:
            assert (answer.verdict, answer.state) == ("final", "DEAD")  # too many losses
            life.end("DEAD")

    @rule(delivery=deliveries)
    def report(self, delivery: Any) -> None:
        if delivery is None or delivery.attempt is None:
            return
        holder = Holder(attempt=delivery.attempt, token=delivery.owner)
        answer = self.ledger.report(delivery.task, holder)
        assert (answer != "superseded") == self._is_current(delivery)

    @rule(delivery=deliveries, success=st.booleans())
    def commit(self, delivery: Any, success: bool) -> None:
        if delivery is None or delivery.attempt is None:
            return
        life = self.lives[delivery.task]
        state = TaskState.SUCCEEDED if success else TaskState.FAILED
        current = self._is_current(delivery)
        again = life.state == str(state) and life.attempt == delivery.attempt
        holder = Holder(attempt=delivery.attempt, token=delivery.owner)
        done = self.ledger.commit(delivery.task, state, holder=holder, result={"by": 1})
        assert done == self.ledger.commit(delivery.task, state, holder=holder, result={"by": 1})
        assert done == (current or again)
        if current:
            life.end(str(state))
            life.commits += 1

    @rule(delivery=deliveries, delay=st.sampled_from([0, 1000]), reason=st.sampled_from(["failed", "preempted"]))
    def give_back(self, delivery: Any, delay: float, reason: Any) -> None:
        if delivery is None or delivery.attempt is None:
            return
        life = self.lives[delivery.task]
        may = self._is_current(delivery) and self._holds(delivery)

        def step() -> str:
            holder = Holder(attempt=delivery.attempt, token=delivery.owner)
            return self.ledger.give_back(delivery.task, holder, delivery.tag, reason=reason, delay_seconds=delay)

        answer = step()
        assert step() == ("refused" if answer == "queued" else answer)  # as if the answer had been lost
        if not may:
            assert answer == "refused"
        elif answer == "queued":
            life.state, life.current = "QUEUED", None
            self.tables[delivery.owner].forget(delivery.tag)
        else:
            assert answer == "cancel"
            assert life.cancel_wanted

    @rule(delivery=consumes(deliveries))
    def ack(self, delivery: Any) -> None:
        """Acknowledge what has ended, as Celery does after the tail."""
        if delivery is None or self.lives[delivery.task].state in ("QUEUED", "RUNNING"):
            return
        holds = self._holds(delivery) and self.tables[delivery.owner].holds(delivery.tag)
        assert self.tables[delivery.owner].settle(delivery.tag, "ack") == holds

    @rule(task=tasks)
    def cancel(self, task: str) -> None:
        life = self.lives[task]
        lease = self.client.zscore(self.keys.leases, self.client.hget(self.keys.task(task), "tag") or "")
        runs = life.state == "RUNNING" and lease is not None and lease > self.client.time()[0]
        verdict, _ = self.ledger.cancel(task)
        again, _ = self.ledger.cancel(task)  # as if the answer had been lost
        assert again == ("requested" if verdict == "requested" else "final")
        if runs:
            assert verdict == "requested"
            life.cancel_wanted = True
        elif life.state in ("QUEUED", "RUNNING"):  # nobody runs it, whatever its record says
            assert verdict == "cancelled"
            life.end("CANCELLED")
        else:
            assert verdict == "final"

    @rule(task=tasks)
    def retry_by_hand(self, task: str) -> None:
        life = self.lives[task]
        queued = self.ledger.requeue(task)
        assert not self.ledger.requeue(task)  # as if the answer had been lost
        assert queued == (life.state in ("FAILED", "CANCELLED", "DEAD"))
        if queued:
            life.state, life.commits, life.lives = "QUEUED", 0, life.lives + 1

    # -- time and trouble --------------------------------------------------------------------------------------------

    @rule(everyone=st.booleans(), owner=owners)
    def leases_end(self, everyone: bool, owner: str) -> None:
        """Leases expire (their owners were stopped or cut off) and are swept; delayed messages come due."""
        for tag, held in self.client.hgetall(self.keys.owners).items():
            if everyone or held.startswith(owner):
                self.client.zadd(self.keys.leases, {tag: 1})
        for tag in self.client.zrange(self.keys.delayed, 0, -1):
            self.client.zadd(self.keys.delayed, {tag: 1})
        sweeper = self.tables[owner].sweeper
        sweeper.rest_seconds = 0.0
        sweeper.sweep(self.client)
        sweeper.sweep(self.client)

    @rule(owner=owners)
    def renew(self, owner: str) -> None:
        """A process renews; it takes back what nobody holds, and forgets what it has LOST."""
        self.tables[owner]._renew()

    @rule(task=tasks)
    def message_vanishes_and_is_restored(self, task: str) -> None:
        """The message of an unfinished task is nowhere; the reconciler puts it back."""
        life = self.lives[task]
        raw = self.client.hget(self.keys.task(task), "message")
        waiting = self.client.lrem(self._list(), 0, raw) if raw else 0
        answer = self.ledger.restore(task, least_age_seconds=-1)
        if waiting and life.state in ("QUEUED", "RUNNING"):
            assert answer == "restored"
            life.state, life.current = "QUEUED", None
        elif life.state in ("QUEUED", "RUNNING"):
            assert answer == "present"
        else:
            assert answer == "final"

    # -- what must always hold -----------------------------------------------------------------------------------------

    @invariant()
    def records_are_as_the_model_says(self) -> None:
        unfinished = set(self.ledger.unfinished()) if self.lives else set()
        for task_id, life in self.lives.items():
            record = self.ledger.get(task_id)
            state = "RUNNING" if str(record.state) == "STARTING" else str(record.state)
            assert (state, record.attempt) == (life.state, life.attempt)
            assert life.commits <= 1
            assert (task_id in unfinished) == (not record.state.final)

    @invariant()
    def an_unfinished_task_has_exactly_one_message(self) -> None:
        if not self.lives:
            return
        places = self._places()
        for task_id, life in self.lives.items():
            if life.state in ("QUEUED", "RUNNING"):
                assert places.get(task_id, 0) >= 1, "lost"
                if life.lives == 1:
                    assert places[task_id] == 1, "there twice"

    @invariant()
    def a_lease_is_whole(self) -> None:
        leases = set(self.client.zrange(self.keys.leases, 0, -1))
        assert leases == set(self.client.hkeys(self.keys.unacked)) == set(self.client.hkeys(self.keys.owners))
        delayed = set(self.client.zrange(self.keys.delayed, 0, -1))
        assert delayed == set(self.client.hkeys(self.keys.parked))

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _list(self) -> str:
        return f"{self.keys.prefix}{QUEUE}"

    def _holds(self, delivery: Delivery) -> bool:
        held = self.client.hget(self.keys.owners, delivery.tag)
        return bool(held and held.startswith(f"{delivery.owner}\n"))

    def _is_current(self, delivery: Delivery) -> bool:
        life = self.lives[delivery.task]
        return life.state == "RUNNING" and life.current == (delivery.owner, delivery.attempt)

    def _places(self) -> dict[str, int]:
        raws = [*self.client.lrange(self._list(), 0, -1), *self.client.hvals(self.keys.unacked)]
        raws += [raw.split("\n", 2)[2] for raw in self.client.hvals(self.keys.parked)]
        counts: dict[str, int] = {}
        for raw in raws:
            task_id = json.loads(raw)["headers"]["id"]
            counts[task_id] = counts.get(task_id, 0) + 1
        return counts


@pytest.mark.timeout(3600)  # for one that hangs; what bounds it is the number of its steps
def test_the_ledger_holds_whatever_happens(tmp_path: Path) -> None:
    case = LedgerMachine.TestCase
    case.settings = settings(
        max_examples=SEQUENCES, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    with WORLD.opened(tmp_path):
        case().runTest()
