"""The ledger and the leases against a model: any order of steps, crashes between any two of them, zombies included.

A process is a token; it "crashes" by doing nothing more, and comes back as a zombie when the machine picks it again.
The last call of everybody may be sent again at any time, as a client does whose answer was lost.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gpuflow.broker.lease_table import LeaseTable
from gpuflow.broker.scripts import broker_script
from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.ledger.ledger import Holder
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.settings import Settings
from tests.support.fleet import Broker
from tests.support.lost_answers import Calls
from tests.support.pops import POP_ONE

LEASE_SECONDS = 1000.0
#: How many random sequences of steps are tried, in each of so many parts.
SEQUENCES = int(os.environ.get("LEDGER_SEQUENCES", "150"))
PARTS = int(os.environ.get("LEDGER_PARTS", "1"))
#: Steps of one sequence at most.
STEPS = int(os.environ.get("LEDGER_STEPS", "40"))
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


@dataclass(eq=False)
class Delivery:
    """A message in the hands of a process, and the attempt that it began there.

    `number` is the process's own of its deliveries. `at_work` from its start. `unread`: its task was told so.
    """

    owner: str
    tag: str
    task: str
    number: int | None
    attempt: int | None = None
    at_work: bool = False
    unread: bool = False


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
        self.calls = Calls(self.client)
        self.tables = {name: self._table(name) for name in ("a:1", "b:1", "c:1")}

    def _table(self, owner: str) -> LeaseTable:
        table = LeaseTable(self.keys, LEASE_SECONDS, owner=owner)
        table.connect(self.client, keep=False)
        table.reclaim = lambda free, new: self.ledger.reclaim(free, owner, LEASE_SECONDS, new_run=new)
        return table

    # -- steps ------------------------------------------------------------------------------------------------------

    @rule(ago=st.integers(0, 8))
    def an_answer_was_lost(self, ago: int) -> None:
        """Somebody sends his last call again, whatever has happened since: once is enough."""
        self.calls.repeat(ago)

    @rule(target=tasks)
    def submit(self) -> str:
        with self.calls.of(object()):
            task = submit(SPEC, app=self.app)
        self.lives[task.id] = Life()
        return task.id

    @rule(target=deliveries, owner=owners, starts=st.booleans())
    def pop(self, owner: str, starts: bool) -> Any:
        keys, table = self.keys, self.tables[owner]
        names = [keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep, table.bell]
        taken = broker_script("pop")(self.client, [*names, self._list()], [owner, LEASE_SECONDS, POP_ONE])
        if not taken[0]:
            return multiple()
        message = json.loads(taken[1])
        tag = message["properties"]["delivery_tag"]
        if not table.accept(tag, QUEUE, taken[0], taken[1], taken[5]):
            return multiple()  # an earlier delivery of it is at work there
        delivery = Delivery(owner=owner, tag=tag, task=message["headers"]["id"], number=table.delivery(tag))
        if starts:
            self.start(delivery)
        return delivery

    @rule(delivery=deliveries, delay=st.sampled_from([0, 1000]), side=st.sampled_from(["front", "back"]))
    def put_back(self, delivery: Delivery, delay: float, side: str) -> None:
        """What has not begun goes back."""
        if self._is_unstarted(delivery):
            holds = self._holds(delivery)
            with self.calls.of(delivery):
                assert self.tables[delivery.owner].settle(delivery.tag, side, delay) == holds

    @rule(delivery=deliveries)
    def cannot_be_read(self, delivery: Delivery) -> None:
        """Say so to the task, which fails; then the message is put aside."""
        if not self._is_unstarted(delivery) or delivery.unread or not self._holds(delivery):
            return
        life = self.lives[delivery.task]
        if life.state == "RUNNING":
            return
        with self.calls.of(("unread", delivery.task)):
            failed = self.ledger.commit(delivery.task, TaskState.FAILED, holder=None, error={"type": "Unreadable"})
        assert failed == (life.state in ("QUEUED", "FAILED")) == bool(self.calls.again())
        if life.state == "QUEUED":
            life.end("FAILED")
        delivery.unread = True

    @rule(delivery=deliveries)
    def put_aside(self, delivery: Delivery) -> None:
        if self._is_unstarted(delivery) and delivery.unread and self.lives[delivery.task].state != "RUNNING":
            with self.calls.of(delivery):
                self.tables[delivery.owner].set_aside(delivery.tag, delivery.task, "it cannot be read")

    @rule(delivery=deliveries)
    def begin(self, delivery: Delivery) -> None:
        self.start(delivery)

    def start(self, delivery: Delivery) -> None:
        table, life = self.tables[delivery.owner], self.lives[delivery.task]
        if delivery.at_work or delivery.unread or not table.start(delivery.tag, delivery=delivery.number):
            return
        delivery.at_work = True
        holds = self._holds(delivery)
        with self.calls.of(delivery):
            answer = self.ledger.start(
                delivery.task,
                worker="w",
                owner_token=delivery.owner,
                tag=delivery.tag,
                returned=table.returned(delivery.tag),
            )
        again = self.calls.again()
        assert again[:3] == [answer.verdict, answer.state, answer.attempt]
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
            table.begin(delivery.tag, delivery.task, answer.attempt)
        elif answer.verdict == "live":  # the message of an earlier life, beside an attempt of this one
            assert life.state == "RUNNING"
            assert life.lives > 1
        elif life.cancel_wanted:
            assert (answer.verdict, answer.state) == ("final", "CANCELLED")
            life.end("CANCELLED")
        else:
            assert (answer.verdict, answer.state) == ("final", "DEAD")  # too many losses
            life.end("DEAD")

    @rule(delivery=deliveries)
    def report(self, delivery: Delivery) -> None:
        if delivery.attempt is None:
            return
        holder = Holder(attempt=delivery.attempt, token=delivery.owner)
        with self.calls.of(delivery):
            answer = self.ledger.report(
                delivery.task, holder, ['{"event": "log"}'], '{"step": 1}', '{"status": "PROGRESS"}'
            )
        assert self.calls.again() == answer
        assert (answer != "superseded") == self._is_current(delivery)

    @rule(delivery=deliveries, success=st.booleans())
    def commit(self, delivery: Delivery, success: bool) -> None:
        if delivery.attempt is None:
            return
        life = self.lives[delivery.task]
        state = TaskState.SUCCEEDED if success else TaskState.FAILED
        current = self._is_current(delivery)
        again = life.state == str(state) and life.attempt == delivery.attempt
        holder = Holder(attempt=delivery.attempt, token=delivery.owner)
        with self.calls.of(delivery):
            done = self.ledger.commit(delivery.task, state, holder=holder, result={"by": 1})
        assert done == bool(self.calls.again())
        assert done == (current or again)
        if current:
            life.end(str(state))
            life.commits += 1

    @rule(delivery=deliveries, delay=st.sampled_from([0, 1000]), reason=st.sampled_from(["failed", "preempted"]))
    def yield_attempt(self, delivery: Delivery, delay: float, reason: Any) -> None:
        if delivery.attempt is None:
            return
        life = self.lives[delivery.task]
        may = self._is_current(delivery) and self._holds(delivery)
        holder = Holder(attempt=delivery.attempt, token=delivery.owner)
        with self.calls.of(delivery):
            answer = self.ledger.yield_attempt(delivery.task, holder, delivery.tag, reason=reason, delay_seconds=delay)
        assert self.calls.again() == ("refused" if answer == "queued" else answer)
        if not may:
            assert answer == "refused"
        elif answer == "queued":
            life.state, life.current = "QUEUED", None
            self.tables[delivery.owner].forget(delivery.tag)
            self._over(delivery)
        else:
            assert answer == "cancel"
            assert life.cancel_wanted

    @rule(delivery=consumes(deliveries))
    def ack(self, delivery: Delivery) -> None:
        """Acknowledge what has ended, as Celery does after the tail."""
        if self.lives[delivery.task].state in ("QUEUED", "RUNNING"):
            return
        table = self.tables[delivery.owner]
        if table.delivery(delivery.tag) == delivery.number:
            holds = self._holds(delivery)
            with self.calls.of(delivery):
                assert table.settle(delivery.tag, "ack") == holds
        self._over(delivery)

    @rule(delivery=consumes(deliveries))
    def stop(self, delivery: Delivery) -> None:
        """End what runs for a lease that is known to be LOST."""
        if self.tables[delivery.owner].delivery(delivery.tag) != delivery.number:
            self._over(delivery)
            self.calls.over(delivery)

    @rule(task=tasks)
    def cancel(self, task: str) -> None:
        life = self.lives[task]
        lease = self.client.zscore(self.keys.leases, self.client.hget(self.keys.task(task), "tag") or "")
        runs = life.state == "RUNNING" and lease is not None and lease > self.client.time()[0]
        with self.calls.of(("cancel", task)):
            verdict, _ = self.ledger.cancel(task)
        assert self.calls.again()[0] == verdict
        again, _ = self.ledger.cancel(task)  # another user wants it, too
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
        with self.calls.of(("retry", task)):
            queued = self.ledger.retry_task(task)
        assert queued == bool(self.calls.again())
        assert not self.ledger.retry_task(task)  # another user wants it, too
        assert queued == (life.state in ("FAILED", "CANCELLED", "DEAD"))
        if queued:
            life.state, life.commits, life.lives = "QUEUED", 0, life.lives + 1

    # -- time and trouble --------------------------------------------------------------------------------------------

    @rule(everyone=st.booleans(), owner=owners)
    def leases_end(self, everyone: bool, owner: str) -> None:
        """Leases expire (their owners were stopped or cut off) and are swept; delayed messages come due."""
        owners = self.client.hgetall(self.keys.owners)
        leased = self._in_order(self.client.hgetall(self.keys.unacked))
        ended = [tag for tag in leased if everyone or owners[tag].startswith(owner)]
        parked = self.client.hgetall(self.keys.parked)
        due = self._in_order({tag: raw.split("\n", 2)[2] for tag, raw in parked.items()})
        for key, tags in ((self.keys.leases, ended), (self.keys.delayed, due)):
            for number, tag in enumerate(tags, 1):
                self.client.zadd(key, {tag: number})
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
        with self.calls.of(("restore", task)):
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
    def all_is_as_the_model_says(self) -> None:
        """One read of everything: with so many steps, round trips are what the time goes into."""
        keys, pipe = self.keys, self.client.pipeline()
        pipe.smembers(keys.unfinished)
        pipe.zrange(keys.leases, 0, -1)
        pipe.hgetall(keys.unacked)
        pipe.hkeys(keys.owners)
        pipe.zrange(keys.delayed, 0, -1)
        pipe.hgetall(keys.parked)
        pipe.lrange(self._list(), 0, -1)
        for task_id in self.lives:
            pipe.hgetall(keys.task(task_id))
        unfinished, leases, unacked, owners, delayed, parked, waiting, *raws = pipe.execute()
        records = [TaskRecord.from_hash(raw) for raw in raws]
        self._records_are_right(records, unfinished)
        self._no_message_is_lost([*waiting, *unacked.values(), *(raw.split("\n", 2)[2] for raw in parked.values())])
        assert set(leases) == set(unacked) == set(owners)
        assert set(delayed) == set(parked)

    def _records_are_right(self, records: list[TaskRecord], unfinished: set[str]) -> None:
        for record, (task_id, life) in zip(records, self.lives.items(), strict=True):
            state = "RUNNING" if str(record.state) == "STARTING" else str(record.state)
            assert (record.id, state, record.attempt) == (task_id, life.state, life.attempt)
            assert life.commits <= 1
            assert (task_id in unfinished) == (not record.state.final)

    def _no_message_is_lost(self, messages: list[str]) -> None:
        places = Counter(json.loads(message)["headers"]["id"] for message in messages)
        for task_id, life in self.lives.items():
            if life.state in ("QUEUED", "RUNNING"):
                assert places[task_id] >= 1, "lost"
                if life.lives == 1:
                    assert places[task_id] == 1, "there twice"

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _in_order(self, messages: Mapping[str, str]) -> list[str]:
        """Return the tags of messages by the age of their tasks, then of themselves: ids are random."""
        tasks = list(self.lives)

        def age(tag: str) -> tuple[int, float]:
            message = json.loads(messages[tag])
            return tasks.index(message["headers"]["id"]), message["at"]

        return sorted(messages, key=age)

    def _list(self) -> str:
        return f"{self.keys.prefix}{QUEUE}"

    def _is_unstarted(self, delivery: Delivery) -> bool:
        """Whether it waits in its process for a slot."""
        lease = self.tables[delivery.owner].held().get(delivery.tag)
        return lease is not None and lease.delivery == delivery.number and not lease.started

    def _over(self, delivery: Delivery) -> None:
        if delivery.at_work:
            self.tables[delivery.owner].over(delivery.tag)

    def _holds(self, delivery: Delivery) -> bool:
        held = self.client.hget(self.keys.owners, delivery.tag)
        return bool(held and held.startswith(f"{delivery.owner}\n"))

    def _is_current(self, delivery: Delivery) -> bool:
        life = self.lives[delivery.task]
        return life.state == "RUNNING" and life.current == (delivery.owner, delivery.attempt)


@pytest.mark.timeout(3600 + SEQUENCES)  # for one that hangs; what bounds it is the number of its steps
@pytest.mark.parametrize("part", range(PARTS))
def test_the_ledger_holds_whatever_happens(tmp_path: Path, part: int) -> None:
    case = LedgerMachine.TestCase
    case.settings = settings(
        max_examples=SEQUENCES,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=PARTS == 1,  # the bounded run tries the same sequences each time
    )
    with WORLD.opened(tmp_path):
        case().runTest()
    print(f"\npart {part + 1} of {PARTS}: {SEQUENCES} sequences")
