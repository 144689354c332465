"""The merge layer against a model: any order of steps, completions that stop between any two of them, and lost answers.

A process is a token; it "crashes" by doing nothing more. Runs are executed by the test, their callers are completed by
the real code, which is stopped after any number of round trips.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gpuflow.broker.lease_table import LeaseTable
from gpuflow.broker.priorities import list_key, list_keys
from gpuflow.broker.scripts import broker_script
from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.ledger.ledger import Holder
from gpuflow.ledger.states import TaskState
from gpuflow.merge import completion
from gpuflow.settings import Settings
from gpuflow.upkeep.reconciler import Reconciler
from tests.support.fleet import Broker
from tests.support.lost_answers import Calls
from tests.support.pops import POP_ONE

LEASE_SECONDS = 1000.0
#: How many random sequences of steps are tried, in each of so many parts.
SEQUENCES = int(os.environ.get("MERGE_SEQUENCES", "25"))
PARTS = int(os.environ.get("MERGE_PARTS", "1"))
#: Steps of one sequence at most.
STEPS = int(os.environ.get("MERGE_STEPS", "40"))
QUEUE = "cpu"
OWNERS = ("a:1", "b:1")
MAX_CALLS, MAX_TOKENS, MAX_RESULTS, MAX_ATTEMPTS = 3, 30, 2, 2
#: Tokens of each different call, by the characters of its data.
TOKENS = (0, 11, 26, 0, 0)
CHARACTERS = (0, 40, 100, 0, 0)
#: The call that is compatible with no other one.
APART = 4
OPEN = ("QUEUED", "RUNNING")
#: What `_verdict` says of a call that is answered by another run.
AGAIN = "AGAIN"
#: What is looked at of every record after each step.
FIELDS = ("state", "run", "call", "result", "error", "cancel_requested")


class Stopped(Exception):
    """A process has stopped between two steps."""


@dataclass
class Call:
    """What the model knows of one caller. `at` is the model's time of its submission.

    `state` is MERGED while it waits for `run`; without a run it runs by itself.
    """

    id: str
    number: int
    run: str | None
    state: str = "MERGED"
    end: tuple[str, Any] | None = None
    told: bool = False
    current: tuple[str, int] | None = None


@dataclass
class Run:
    """What the model knows of one run. `calls` are the numbers of its different calls.

    `children` says how each call went, `by` names the attempt that said so; `left` after all of its callers have gone.
    """

    id: str
    batch: str
    calls: set[int] = field(default_factory=set)
    tokens: int = 0
    priority: int = 5
    ttl: float = 0
    state: str = "QUEUED"
    current: tuple[str, int] | None = None
    attempt: int = 0
    failures: int = 0
    children: dict[int, str] = field(default_factory=dict)
    by: str = ""
    at: float = 0.0
    left: bool = False
    cancel_wanted: bool = False
    gone: bool = False


@dataclass(eq=False)
class Delivery:
    """A message in the hands of a process, and the attempt that it began there."""

    owner: str
    tag: str
    task: str
    number: int | None
    attempt: int | None = None
    at_work: bool = False


@dataclass
class World:
    """A real server and app, shared by all sequences."""

    broker: Any = None
    app: Any = None

    @contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        with ExitStack() as stack:  # the last one first
            self.broker = Broker(folder / "broker")
            stack.callback(self.broker.close)
            env = {
                "REDIS_URL": self.broker.url,
                "RESULTS_DIR": str(folder / "results"),
                "GPUFLOW_LEASE_SEC": str(LEASE_SECONDS),
                "TASK_MERGE_MAX_BATCH_SIZE": str(MAX_CALLS),
                "TASK_MERGE_MAX_BATCH_TOKENS": str(MAX_TOKENS),
                "GPUFLOW_MERGE_MAX_RESULTS": str(MAX_RESULTS),
            }
            self.app = GPUFlow("gpuflow", settings=Settings.load(env=env, cwd=folder))
            self.app.conf.worker_send_task_events = False
            stack.callback(self.app.redis.close)
            stack.callback(self.app.close)
            yield


WORLD = World()


def spec_of(number: int, ttl: float, priority: int, notified: bool) -> dict[str, Any]:
    more: dict[str, Any] = {"resultTtlSeconds": ttl} if ttl else {}
    if CHARACTERS[number]:
        more["data"] = {"type": "list", "items": ["x" * CHARACTERS[number]]}
    if notified:
        more["notify"] = [{"url": "https://example.com/told", "on": ["finished"]}]
    return {
        "taskType": "echo",
        "echo": {"output": number},
        "retry": {"max_attempts": MAX_ATTEMPTS, "backoff_seconds": 0 if number == APART else 5},
        "merge": "always",
        "priority": priority,
        **more,
    }


@contextmanager
def stopping(client: Any, steps: int | None) -> Iterator[None]:
    """Let this client make so many round trips, then stop whoever uses it."""
    left = float("inf") if steps is None else steps

    def limited(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left <= 0:
                raise Stopped
            left -= 1
            return real(*args, **kwargs)

        return call

    real_pipeline = client.pipeline

    def pipeline(*args: Any, **kwargs: Any) -> Any:
        pipe = real_pipeline(*args, **kwargs)
        pipe.execute = limited(pipe.execute)
        return pipe

    with (
        patch.object(client, "execute_command", limited(client.execute_command)),
        patch.object(client, "pipeline", pipeline),
    ):
        yield


class MergeMachine(RuleBasedStateMachine):
    calls = Bundle("calls")
    deliveries = Bundle("deliveries")
    owners = st.sampled_from(OWNERS)
    #: After how many round trips a process stops; None: it does not.
    stops = st.one_of(st.none(), st.none(), st.integers(0, 14))
    ends = st.lists(st.sampled_from(["ok", "ok", "fatal", "again", "none"]), min_size=MAX_CALLS, max_size=MAX_CALLS)
    anything = st.integers(0, 1000)
    wishes = st.tuples(
        st.integers(0, len(TOKENS) - 1),
        st.sampled_from([0, 100.5, 1000]),
        st.sampled_from([1, 5, 7, 9]),
        st.booleans(),
    )

    @initialize()
    def empty(self) -> None:
        self.client = WORLD.broker.client
        self.client.flushall()
        self.app = WORLD.app
        self.ledger, self.merger, self.keys = self.app.ledger, self.app.merger, self.app.keys
        self.reconciler = Reconciler(self.app)
        self.of: dict[str, Call] = {}
        self.runs: dict[str, Run] = {}
        self.digests: dict[int, str] = {}
        self.batches: dict[bool, str] = {}
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self.steps = Calls(self.client)
        self.tables = {name: self._table(name) for name in OWNERS}

    def _table(self, owner: str) -> LeaseTable:
        table = LeaseTable(self.keys, LEASE_SECONDS, owner=owner)
        table.connect(self.client, keep=False)
        table.reclaim = lambda free, new: self.ledger.reclaim(free, owner, LEASE_SECONDS, new_run=new)
        return table

    # -- callers ------------------------------------------------------------------------------------------------------

    @rule(ago=st.integers(0, 8))
    def an_answer_was_lost(self, ago: int) -> None:
        """Somebody sends his last step again, whatever has happened since: once is enough."""
        self.steps.repeat(ago)

    @rule(target=calls, wishes=st.lists(wishes, min_size=1, max_size=3))
    def submit(self, wishes: list[tuple[int, float, int, bool]]) -> Any:
        """Calls are submitted: number, seconds for which a result may be used again, priority, whether it notifies."""
        return multiple(*[self._submit(*wish) for wish in wishes])

    def _submit(self, number: int, ttl: float, priority: int, notified: bool) -> str:
        held = self._held("merge:call:" + self.digests.get(number, ""))
        batch = self._held("merge:batch:" + self.batches.get(number == APART, ""))
        with self.steps.of(object()):
            task = submit(spec_of(number, ttl, priority, notified), app=self.app)
        assert self.steps.again()[0] == "repeated"
        record = self.ledger.get(task.id)
        assert record.state is TaskState.MERGED and record.run and record.call
        assert self.digests.setdefault(number, record.call) == record.call
        ((_, entry),) = self.client.xrevrange(self.keys.events(task.id), count=1)
        how = json.loads(entry["event"])["how"]
        expected = self._way(number, ttl, held, batch, record.run)
        assert (how, record.run) == expected, f"{how} {record.run} instead of {expected}"
        self.counts["calls"] += 1
        self.counts[how] += 1
        if how == "new":
            key = self.client.hget(self.keys.task(record.run), "merge_batch")
            assert self.batches.setdefault(number == APART, key) == key
            self.runs[record.run] = Run(id=record.run, batch=key, priority=priority)
        run = self.runs[record.run]
        if how in ("new", "batched"):
            run.calls.add(number)
            run.tokens += TOKENS[number]
        if how != "hit":
            run.ttl = max(run.ttl, ttl)
        if run.state == "QUEUED" and self._waits_in_list(run):
            run.priority = max(run.priority, priority)
        self.of[task.id] = Call(id=task.id, number=number, run=record.run)
        return task.id

    def _way(self, number: int, ttl: float, held: str | None, batch: str | None, fresh: str) -> tuple[str, str]:
        """Return how a call joins, and what, by what the model knows of the runs that its keys name."""
        run = self.runs.get(held or "")
        if run is not None and not run.gone:
            if run.state == "SUCCEEDED" and run.children.get(number) == "ok" and ttl and self.now - run.at <= ttl:
                return ("hit", run.id)
            if run.state in OPEN and not (run.left or run.cancel_wanted) and number in run.calls:
                return ("coalesced", run.id)
        run = self.runs.get(batch or "")
        waits = run is not None and not run.gone and run.state == "QUEUED" and not run.attempt
        if run is not None and waits and len(run.calls) < MAX_CALLS and run.tokens + TOKENS[number] <= MAX_TOKENS:
            return ("batched", run.id)
        assert fresh not in self.runs
        return ("new", fresh)

    @rule(call=calls)
    def leave(self, call: str) -> None:
        """A caller is cancelled, or one that runs by itself and waits."""
        mine = self.of[call]
        if mine.state == "RUNNING":
            return
        with self.steps.of(("cancel", call)):
            verdict = self.app.cancel_task(call)
        self.steps.again()
        assert verdict == ("cancelled" if mine.state in ("MERGED", "QUEUED") else "final") or mine.end
        if mine.state not in ("MERGED", "QUEUED"):
            return
        was_merged, mine.state, mine.end, mine.told = mine.state == "MERGED", "CANCELLED", ("CANCELLED", None), True
        if was_merged:
            self._left(mine)

    def _left(self, mine: Call) -> None:
        run = self.runs[mine.run or ""]
        if run.state not in OPEN or run.gone:
            return
        if not self._waiting(run):
            run.left = True
            if run.state == "QUEUED":
                run.state = "CANCELLED"
        elif run.state == "QUEUED" and not self._waiting(run, mine.number):
            run.calls.discard(mine.number)

    @rule(call=calls)
    def retry_by_hand(self, call: str) -> None:
        mine = self.of[call]
        with self.steps.of(("retry", call)):
            queued = self.ledger.retry_task(call)
        assert queued == bool(self.steps.again())
        assert queued == (mine.state in ("FAILED", "CANCELLED", "DEAD"))
        if queued:
            mine.state, mine.run, mine.end, mine.told = "QUEUED", None, None, False

    # -- processes ----------------------------------------------------------------------------------------------------

    @rule(target=deliveries, owner=owners, starts=st.booleans())
    def pop(self, owner: str, starts: bool) -> Any:
        delivery = self._popped(owner, [self.keys.prefix + key for key in list_keys([QUEUE])])
        if delivery is None:
            return multiple()
        if starts:
            self.begin(delivery)
        return delivery

    def _popped(self, owner: str, lists: list[str]) -> Delivery | None:
        keys, table = self.keys, self.tables[owner]
        names = [keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep, table.bell]
        taken = broker_script("pop")(self.client, [*names, *lists], [owner, LEASE_SECONDS, POP_ONE])
        if not taken[0]:
            return None
        message, tag = json.loads(taken[1]), taken[4]
        if not table.accept(tag, QUEUE, taken[0], taken[1], taken[5]):
            return None  # an earlier delivery of it is at work there
        return Delivery(owner=owner, tag=tag, task=message["headers"]["id"], number=table.delivery(tag))

    @rule(owner=owners, count=st.integers(1, 3), ends=ends, stop=stops)
    def work(self, owner: str, count: int, ends: list[str], stop: int | None) -> None:
        """A process takes what is next, and brings it to its end; it may stop during the last of these ends."""
        for left in reversed(range(count)):
            delivery = self._popped(owner, [self.keys.prefix + key for key in list_keys([QUEUE])])
            if delivery is not None:
                self.begin(delivery, None if left else stop)
                self.succeed(delivery, ends, None if left else stop)

    def begin(self, delivery: Delivery, stop: int | None = None) -> None:
        if delivery.at_work or not self.tables[delivery.owner].start(delivery.tag, delivery=delivery.number):
            return
        verdict = self._start(delivery)
        run = self.runs.get(delivery.task)
        if verdict == "begin":
            return
        if verdict == "final" and run is not None:
            self._complete(delivery, stop)
        elif verdict == "lost":
            self._dies(delivery)
        else:
            if run is None and verdict == "final":
                self.of[delivery.task].told = True
            self._ack(delivery)

    @rule(delivery=deliveries, stop=stops)
    def begin_and_stop(self, delivery: Delivery, stop: int | None) -> None:
        """The delivery of a run that has ended completes it, and may stop on the way."""
        self.begin(delivery, stop)

    def _start(self, delivery: Delivery) -> str:
        """START, and what the model says of its answer."""
        table = self.tables[delivery.owner]
        delivery.at_work = True
        holds = self._holds(delivery)
        with self.steps.of(delivery):
            answer = self.ledger.start(
                delivery.task,
                worker="w",
                owner_token=delivery.owner,
                tag=delivery.tag,
                returned=table.returned(delivery.tag),
            )
        assert self.steps.again()[:3] == [answer.verdict, answer.state, answer.attempt]
        if not holds:
            assert answer.verdict == "lost"
            return "lost"
        it: Any = self.runs.get(delivery.task) or self.of[delivery.task]
        if answer.verdict == "begin":
            delivery.attempt = answer.attempt
            it.current, it.state = (delivery.owner, answer.attempt), "RUNNING"
            table.begin(delivery.tag, delivery.task, answer.attempt)
            if isinstance(it, Run):
                it.attempt = answer.attempt
                assert self._waiting(it), "a run began that nobody waits for"
                assert not it.left and not it.cancel_wanted
                assert set(self.merger.store.calls(it.id)) == {self.digests[one] for one in it.calls}
            else:
                assert it.run is None
        elif isinstance(it, Run) and it.state in OPEN:
            assert answer.verdict == "final"
            assert answer.state == ("CANCELLED" if it.left or it.cancel_wanted else "DEAD")
            it.state, it.current, it.at = answer.state, None, self.now
            it.by = ""
        elif isinstance(it, Run):
            assert answer.verdict == ("gone" if it.gone else "final")
        else:
            assert answer.verdict == {"MERGED": "merged", "QUEUED": "begin", "RUNNING": "live"}.get(it.state, "final")
        return answer.verdict

    @rule(owner=owners, stop=stops)
    def fetch(self, owner: str, stop: int | None) -> None:
        """A message of a caller is taken from the control queue."""
        delivery = self._popped(owner, [self.app.merger.store.control_list])
        if delivery is None or not self.tables[owner].start(delivery.tag):
            return
        call = self.of[delivery.task]
        verdict = self._start_of_fetch(delivery, call)
        # It may wait for no run any more: queued again by hand, it has a message of its own.
        stopped = (
            verdict == "merged"
            and call.state == "MERGED"
            and self._stopped(delivery, stop, lambda: self.merger.fetch(self.ledger.get(call.id)))
        )
        self._observe()
        if stopped:
            self._dies(delivery)
        else:
            call.told = call.end is not None
            self._ack(delivery)

    def _start_of_fetch(self, delivery: Delivery, call: Call) -> str:
        table = self.tables[delivery.owner]
        delivery.at_work = True
        with self.steps.of(delivery):
            answer = self.ledger.start(
                call.id,
                worker="w",
                owner_token=delivery.owner,
                tag=delivery.tag,
                returned=table.returned(delivery.tag),
                fetches=True,
            )
        self.steps.again()
        assert answer.verdict in ("merged", "final"), "an attempt began in the control queue"
        assert (answer.verdict == "final") == (call.end is not None)
        return str(answer.verdict)

    @rule(delivery=deliveries, ends=ends, stop=stops)
    def succeed(self, delivery: Delivery, ends: list[str], stop: int | None) -> None:
        """The attempt of a run ends with a result of each call, or an error of it, or neither."""
        run = self.runs.get(delivery.task)
        if delivery.attempt is None or run is None:
            self._end_own(delivery, TaskState.SUCCEEDED, stop)
            return
        by = f"{run.id}/{delivery.attempt}"
        went = dict(zip(sorted(run.calls), ends, strict=False))
        children: dict[str, Any] = {}
        for number, end in went.items():
            if end == "ok":
                children[self.digests[number]] = {"output": number, "by": by}
            elif end != "none":
                error = {"type": "Boom", "message": f"{number} {by}", "retryable": end == "again"}
                children[self.digests[number]] = {"error": error}
        if self._committed(delivery, run, TaskState.SUCCEEDED, result={"children": children}):
            run.children, run.by = went, by
            self._complete(delivery, stop)

    @rule(delivery=deliveries, state=st.sampled_from([TaskState.FAILED, TaskState.DEAD]), stop=stops)
    def fail(self, delivery: Delivery, state: TaskState, stop: int | None) -> None:
        """The attempt of a run fails as a whole."""
        run = self.runs.get(delivery.task)
        if delivery.attempt is None or run is None:
            self._end_own(delivery, state, stop)
            return
        by = f"{run.id}/{delivery.attempt}"
        if self._committed(delivery, run, state, error={"type": "Failed", "message": by, "retryable": False}):
            run.by = by
            self._complete(delivery, stop)

    def _end_own(self, delivery: Delivery, state: TaskState, stop: int | None) -> None:
        """The attempt of a caller that runs by itself ends."""
        call = self.of.get(delivery.task)
        if delivery.attempt is None or call is None:
            return
        success = state is TaskState.SUCCEEDED
        result = {"output": call.number, "by": "itself"} if success else None
        error = None if success else {"type": "Failed", "message": "itself", "retryable": False}
        if self._committed(delivery, call, state, result=result, error=error):
            call.end = (str(state), "itself")
            if stop is None:
                call.told = True
                self._ack(delivery)
            else:
                self._dies(delivery)

    def _committed(self, delivery: Delivery, it: Any, state: TaskState, **end: Any) -> bool:
        current = it.state == "RUNNING" and it.current == (delivery.owner, delivery.attempt)
        again = it.state == str(state) and self._attempt(delivery.task) == delivery.attempt
        holder = Holder(attempt=delivery.attempt or 0, token=delivery.owner)
        with self.steps.of(delivery):
            done = self.ledger.commit(delivery.task, state, holder=holder, **end)
        assert done == bool(self.steps.again())
        assert done == (current or again)
        if current:
            it.state, it.current = str(state), None
            if isinstance(it, Run):
                it.at = self.now
        return bool(current)

    @rule(
        delivery=deliveries,
        delay=st.sampled_from([0, 1000]),
        reason=st.sampled_from(["failed", "preempted"]),
        stop=stops,
    )
    def yield_attempt(self, delivery: Delivery, delay: float, reason: Any, stop: int | None) -> None:
        run = self.runs.get(delivery.task)
        if delivery.attempt is None or run is None:
            return
        may = run.state == "RUNNING" and run.current == (delivery.owner, delivery.attempt) and self._holds(delivery)
        holder = Holder(attempt=delivery.attempt, token=delivery.owner)
        with self.steps.of(delivery):
            answer = self.ledger.yield_attempt(delivery.task, holder, delivery.tag, reason=reason, delay_seconds=delay)
        assert self.steps.again() == ("refused" if answer == "queued" else answer)
        if not may:
            assert answer == "refused"
        elif answer == "queued":
            assert not run.left
            run.state, run.current = "QUEUED", None
            run.failures += reason == "failed"
            self.tables[delivery.owner].forget(delivery.tag)
            self._over(delivery)
        else:
            assert answer == "cancel"
            assert run.left or run.cancel_wanted
            error = {"type": "Cancelled", "message": "cancelled by a user", "retryable": False}
            assert self._committed(delivery, run, TaskState.CANCELLED, error=error)
            self._complete(delivery, stop)

    @rule(delivery=consumes(deliveries))
    def stop(self, delivery: Delivery) -> None:
        """End what runs for a lease that is known to be LOST."""
        if self.tables[delivery.owner].delivery(delivery.tag) != delivery.number:
            self._over(delivery)
            self.steps.over(delivery)

    @rule(which=anything, owner=owners, stop=stops)
    def complete_again(self, which: int, owner: str, stop: int | None) -> None:
        """Somebody begins a completion anew, whoever was at it before."""
        if self.runs:
            run = [*self.runs.values()][which % len(self.runs)]
            self._stopped((owner, run.id), stop, lambda: self.merger.complete(run.id))
            self._observe()

    def _complete(self, delivery: Delivery, stop: int | None) -> None:
        """Complete a run before its message is acknowledged."""
        run = self.runs[delivery.task]
        if self._stopped(delivery, stop, lambda: self.merger.complete(run.id)):
            self._dies(delivery)
        else:
            self._observe()
            assert run.gone or not self._waiting(run), "a run was completed, and somebody still waits for it"
            self._ack(delivery)
        self._observe()

    def _dies(self, delivery: Delivery) -> None:
        """The process is gone; the lease of its message is left to the sweep."""
        self.tables[delivery.owner].forget(delivery.tag)
        self._over(delivery)

    def _stopped(self, who: Any, stop: int | None, step: Callable[[], Any]) -> bool:
        with self.steps.of(who):
            try:
                with stopping(self.app.redis, stop):
                    step()
            except Stopped:
                return True
        return False

    def _ack(self, delivery: Delivery) -> None:
        table = self.tables[delivery.owner]
        if table.delivery(delivery.tag) == delivery.number:
            table.settle(delivery.tag, "ack")
        self._over(delivery)

    # -- time and trouble ---------------------------------------------------------------------------------------------

    @rule(kind=st.integers(0, 5), owner=owners, which=anything, stop=stops)
    def trouble(self, kind: int, owner: str, which: int, stop: int | None) -> None:
        """What befalls a fleet beside its work; one rule of many kinds, so that most steps are work."""
        if kind == 0:
            self.renew(owner)
        elif kind == 1:
            self.time_passes((60.0, 500.0, 5000.0)[which % 3])
        elif kind == 2:
            self.record_vanishes(which)
        elif kind == 3:
            self.a_user_cancels_a_run(which, stop)
        elif kind == 4:
            self.reconcile(stop)
        else:
            self.leases_end(which % 2 == 0, owner)

    def leases_end(self, everyone: bool, owner: str) -> None:
        """Leases expire (their owners were stopped or cut off) and are swept; delayed messages come due."""
        owners = self.client.hgetall(self.keys.owners)
        leased = self._in_order(self.client.hgetall(self.keys.unacked))
        ended = [tag for tag in leased if everyone or owners[tag].startswith(owner)]
        parked = self.client.hgetall(self.keys.parked)
        due = self._in_order({tag: raw.split("\n", 2)[2] for tag, raw in parked.items()})
        for key, tags in ((self.keys.leases, ended), (self.keys.delayed, due)):
            if tags:
                self.client.zadd(key, {tag: number for number, tag in enumerate(tags, 1)})
        sweeper = self.tables[owner].sweeper
        sweeper.rest_seconds = 0.0
        sweeper.sweep(self.client)
        sweeper.sweep(self.client)

    def renew(self, owner: str) -> None:
        """A process renews; it takes back what nobody holds, and forgets what it has LOST."""
        self.tables[owner]._renew()
        for run in self.runs.values():  # what it has taken back runs again
            self._sync_taken_back(run)

    def _sync_taken_back(self, run: Run) -> None:
        state, attempt, token = self.client.hmget(self.keys.task(run.id), "state", "attempt", "owner_token")
        if run.state in OPEN and state == "RUNNING":
            run.state, run.current = "RUNNING", (token, int(attempt))

    def time_passes(self, seconds: float) -> None:
        """What the server would see after so long: older results, and keys that have expired."""
        self.now += seconds
        for run in self.runs.values():
            finished = self.client.hget(self.keys.task(run.id), "finished_at")
            if finished:
                self.client.hset(self.keys.task(run.id), "finished_at", f"{float(finished) - seconds:.6f}")
        for key in self._merge_keys("merge:call:*"):
            left = self.client.ttl(key)
            if left > seconds:
                self.client.expire(key, int(left - seconds))
            elif left > 0:
                self.client.delete(key)
        for entry, score in self.client.zrange(self.keys.merge_results, 0, -1, withscores=True):
            self.client.zadd(self.keys.merge_results, {entry: score - seconds})

    def record_vanishes(self, which: int) -> None:
        """The record of a run that has ended expires, or is purged."""
        ended = [run for run in self.runs.values() if run.state not in OPEN and not run.gone and self._may_vanish(run)]
        if ended:
            run = ended[which % len(ended)]
            run.gone = True
            self.client.delete(self.keys.task(run.id), self.keys.events(run.id), self.keys.attempts(run.id))
            self.client.zrem(self.keys.tasks, run.id)
            self.client.zrem(self.keys.dead, run.id)

    def _may_vanish(self, run: Run) -> bool:
        """A success is kept for as long as its message may come again."""
        return run.state != "SUCCEEDED" or not self.client.exists(self.keys.merge_calls(run.id))

    def a_user_cancels_a_run(self, which: int, stop: int | None) -> None:
        """By the id of the run itself: all of its callers end with it."""
        waiting = [run for run in self.runs.values() if run.state in OPEN and not run.gone and not run.left]
        if not waiting:
            return
        run = waiting[which % len(waiting)]
        with self.steps.of(("cancel", run.id)):
            verdict, _ = self.ledger.cancel(run.id)
        self.steps.again()
        if verdict == "requested":
            run.cancel_wanted = True
        else:
            assert verdict == "cancelled"
            run.state, run.current, run.at = "CANCELLED", None, self.now
            self._stopped(("cancel", run.id, "completes"), stop, lambda: self.merger.complete(run.id))
        self._observe()

    def reconcile(self, stop: int | None) -> None:
        """Long after the end of whatever has ended, the reconciler looks for callers that were left."""
        self.time_passes(2 * LEASE_SECONDS + 10)
        with patch("gpuflow.upkeep.reconciler.passes", lambda error: True):
            self._stopped("reconciler", stop, self.reconciler.complete_calls)
        self._observe()

    # -- what must always hold ----------------------------------------------------------------------------------------

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        if not hasattr(self, "of"):
            return
        self._observe()
        keys, pipe = self.keys, self.client.pipeline()
        pipe.smembers(keys.unfinished)
        pipe.hvals(keys.unacked)
        pipe.hvals(keys.parked)
        pipe.hgetall(keys.merge)
        pipe.hgetall(keys.merge_sizes)
        for key in list_keys([QUEUE]):
            pipe.lrange(keys.prefix + key, 0, -1)
        for digest in self.digests.values():
            pipe.get(f"{keys.prefix}merge:call:{digest}")
            pipe.pttl(f"{keys.prefix}merge:call:{digest}")
        for batch in self.batches.values():
            pipe.get(f"{keys.prefix}merge:batch:{batch}")
        unfinished, unacked, parked, counts, kept, *more = pipe.execute()
        lists, more = more[: len(list_keys([QUEUE]))], more[len(list_keys([QUEUE])) :]
        self._keys_are_right(more)
        waiting = [raw for one in lists for raw in one]
        for key, one in zip(list_keys([QUEUE]), lists, strict=True):
            for raw in one:
                run = self.runs.get(json.loads(raw)["headers"]["id"])
                assert run is None or key == list_key(QUEUE, run.priority), f"{key} has {run}"
        messages = [*waiting, *unacked, *(raw.split("\n", 2)[2] for raw in parked)]
        self._no_message_is_lost([json.loads(one)["headers"] for one in messages])
        self._counts_add_up(counts, kept)
        open_ones = {run.id for run in self.runs.values() if run.state in OPEN}
        assert unfinished == open_ones | {call.id for call in self.of.values() if call.end is None}

    def _keys_are_right(self, held: list[Any]) -> None:
        """Each call and each batch names a run that takes it, or a result that may still be used."""
        for number in self.digests:
            run_id, left_ms = held.pop(0), held.pop(0)
            run = self.runs[run_id] if run_id else None
            if run is not None and left_ms >= 0:
                assert run.state == "SUCCEEDED" and run.children[number] == "ok"
                assert left_ms <= 1000 * run.ttl
            elif run is not None:
                assert number in run.calls and not run.left
                assert run.state in (*OPEN, "SUCCEEDED"), f"{number} can join {run}"
        for is_apart in self.batches:
            run_id = held.pop(0)
            run = self.runs[run_id] if run_id else None
            if run is not None:
                assert run.batch == self.batches[is_apart] and not run.left
                assert run.state in (*OPEN, "SUCCEEDED"), f"calls can join {run}"

    def _observe(self) -> None:
        """Read every record, and see whether what has changed may have changed so."""
        pipe = self.client.pipeline(transaction=False)
        for task in (*self.of, *self.runs):
            pipe.hmget(self.keys.task(task), *FIELDS)
        records = [dict(zip(FIELDS, values, strict=True)) for values in pipe.execute()]
        for record in records:
            if record["state"] == "STARTING":
                record["state"] = "RUNNING"
        known = len(self.runs)
        for call, record in zip(self.of.values(), records, strict=False):
            self._see(call, record)
        for run, record in zip([*self.runs.values()][:known], records[len(self.of) :], strict=True):
            assert (record["state"] is None) == run.gone
            if not run.gone:
                assert record["state"] == run.state, f"{run} is {record['state']}"
                wanted = run.state == "RUNNING" and (run.left or run.cancel_wanted)
                assert (record["cancel_requested"] is not None) == wanted

    def _see(self, call: Call, record: dict[str, str]) -> None:
        state = record["state"]
        if call.state != "MERGED" or (state == "MERGED" and record["run"] == call.run):
            assert state == call.state, f"{call} is {state}"
            if call.end is not None:
                assert self._end_of(record) == call.end, "an end has changed"
            return
        run = self.runs[call.run or ""]
        if state == "QUEUED":
            assert run.gone, "it was released from a run that there is"
            call.state, call.run = "QUEUED", None
            self.counts["released"] += 1
            return
        verdict = self._verdict(run, call.number)
        if state == "MERGED":
            assert verdict[0] == AGAIN, f"{call} was regrouped although it has ended {verdict}"
            assert record["run"] == str(uuid.uuid5(completion._RUNS, f"{run.id}/{record['call']}"))
            self._regrouped(call, run, record["run"])
            return
        call.end = self._end_of(record)
        assert call.end == verdict
        call.state = state

    def _regrouped(self, call: Call, old: Run, new: str) -> None:
        if new not in self.runs:
            failures = old.failures + 1 if old.state == "SUCCEEDED" else 0
            self.runs[new] = Run(
                id=new, batch="", calls={call.number}, failures=failures, priority=old.priority, ttl=old.ttl
            )
            self.counts["regrouped"] += 1
        call.run = new

    def _verdict(self, run: Run, number: int) -> tuple[str, Any]:
        """Return the end of a call of a run that has ended: state, and which attempt said so."""
        assert run.state not in OPEN, "a call has ended before its run"
        if run.state == "SUCCEEDED":
            went = run.children.get(number)
            if went in ("again", "none") and run.failures + 1 < MAX_ATTEMPTS:
                return (AGAIN, None)
            state = {"ok": "SUCCEEDED", "fatal": "FAILED"}.get(str(went), "DEAD")
            return (state, "no result" if went == "none" else f"{number} {run.by}")
        if run.state != "CANCELLED" and len(run.calls) > 1:
            return (AGAIN, None)
        return (run.state, run.by if run.state != "CANCELLED" else None)

    def _end_of(self, record: dict[str, str]) -> tuple[str, Any]:
        if record["state"] == "SUCCEEDED":
            result = json.loads(record["result"])
            assert set(result) == {"output", "by"}
            itself = result["by"] == "itself"
            return ("SUCCEEDED", "itself" if itself else f"{result['output']} {result['by']}")
        if record["state"] == "CANCELLED":
            return ("CANCELLED", None)
        error = json.loads(record["error"])
        return (record["state"], "no result" if error["type"] == "NoResult" else error["message"])

    def _no_message_is_lost(self, headers: list[dict[str, Any]]) -> None:
        places = Counter(one["id"] for one in headers)
        for run in self.runs.values():
            if run.state in OPEN:
                assert places[run.id] == 1, f"{places[run.id]} messages of {run}"
            else:
                assert places[run.id] <= 1

    def _counts_add_up(self, counts: dict[str, str], kept: dict[str, str]) -> None:
        known = {name: int(count) for name, count in counts.items() if int(count)}
        bytes_kept = known.pop("kept_bytes", 0)
        known.pop("saved_generations", 0), known.pop("saved_tokens", 0)
        assert known == {name: count for name, count in self.counts.items() if count}
        assert known.get("calls", 0) == sum(known.get(how, 0) for how in ("new", "coalesced", "batched", "hit"))
        assert bytes_kept == sum(map(int, kept.values()))
        assert len(kept) <= MAX_RESULTS and set(kept) == set(self.client.zrange(self.keys.merge_results, 0, -1))

    def teardown(self) -> None:
        """Bring everything to its end."""
        if not hasattr(self, "of"):
            return
        for _ in range(12):
            self._drive()
            control = self.app.merger.store.control_list
            if not self.client.exists(self.keys.unfinished, self.keys.unacked, self.keys.parked, control):
                break
        for call in self.of.values():
            assert call.end is not None, f"{call} has no end"
            self._celery_knows(call)
        assert not self.client.smembers(self.keys.unfinished)
        assert not self._leftovers()
        assert not self.client.hlen(self.keys.unacked) and not self.client.hlen(self.keys.parked)

    def _drive(self) -> None:
        for table in self.tables.values():
            for tag in table.held():
                table.over(tag), table.forget(tag)
            table._at_work.clear()
        self.leases_end(True, OWNERS[0])
        lists = [self.keys.prefix + key for key in list_keys([QUEUE])]
        while (delivery := self._popped(OWNERS[0], lists)) is not None:
            self.begin(delivery)
            if delivery.attempt is not None:
                self.succeed(delivery, ["ok"] * MAX_CALLS, None)
        while self.client.llen(self.app.merger.store.control_list):
            self.fetch(OWNERS[0], None)
        self.all_is_as_the_model_says()
        self.reconcile(None)

    def _leftovers(self) -> list[str]:
        """Return the keys of the merge layer that nothing takes away in time."""
        return [key for key in self._merge_keys("merge:*") if self.client.ttl(key) < 0]

    def _celery_knows(self, call: Call) -> None:
        """A call that has ended without an attempt of its own, and that no message fetches, has Celery's result."""
        raw = self.client.get(self.keys.celery_result(call.id))
        assert raw or call.told, f"Celery was not told of {call}"
        if raw:
            entry = json.loads(raw)
            expected = {"SUCCEEDED": "SUCCESS", "CANCELLED": "REVOKED"}.get(call.state, "FAILURE")
            assert entry["status"] == expected
            if expected == "SUCCESS":
                assert entry["result"]["output"] == call.number

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _merge_keys(self, pattern: str) -> list[str]:
        return sorted(self.client.keys(f"{self.keys.prefix}{pattern}"))

    def _held(self, key: str) -> str | None:
        found: str | None = self.client.get(f"{self.keys.prefix}{key}")
        return found

    def _waiting(self, run: Run, number: int | None = None) -> list[Call]:
        return [
            call
            for call in self.of.values()
            if call.state == "MERGED" and call.run == run.id and number in (None, call.number)
        ]

    def _waits_in_list(self, run: Run) -> bool:
        message, message_list = self.client.hmget(self.keys.task(run.id), "message", "list")
        return message in self.client.lrange(message_list, 0, -1)

    def _attempt(self, task: str) -> int:
        return int(self.client.hget(self.keys.task(task), "attempt") or 0)

    def _in_order(self, messages: dict[str, str]) -> list[str]:
        """Return the tags of messages by the age of their tasks, then of themselves: ids are random."""
        tasks = [*self.of, *self.runs]

        def age(tag: str) -> tuple[int, float]:
            message = json.loads(messages[tag])
            return tasks.index(message["headers"]["id"]), float(message.get("at", 0))

        return sorted(messages, key=age)

    def _over(self, delivery: Delivery) -> None:
        if delivery.at_work:
            self.tables[delivery.owner].over(delivery.tag)

    def _holds(self, delivery: Delivery) -> bool:
        held = self.client.hget(self.keys.owners, delivery.tag)
        return bool(held and held.startswith(f"{delivery.owner}\n"))


@pytest.mark.timeout(3600 + 4 * SEQUENCES)  # for one that hangs; what bounds it is the number of its steps
@pytest.mark.parametrize("part", range(PARTS))
def test_every_call_has_one_end_and_it_is_its_own(tmp_path: Path, part: int) -> None:
    case = MergeMachine.TestCase
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
