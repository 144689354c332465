"""Pipelines against a model: any order of reconciles, ends of tasks, cancels, resumes and expiry of what may expire.

A reconcile of another process stands still before any of its Lua steps, and goes on when the machine lets it. The last
call of everybody may be sent again, as by a client whose answer was lost. In the end every pipeline comes to its end.
"""

from __future__ import annotations

import base64
import json
import os
import threading
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
from gpuflow.broker.scripts import Script, broker_script
from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit_pipeline
from gpuflow.handles import PipelineRun
from gpuflow.ledger.ledger import Holder
from gpuflow.ledger.states import TaskState
from gpuflow.pipelines.records import PipelineRecord, PipelineState, StageState
from gpuflow.settings import Settings
from tests.support.fleet import Broker
from tests.support.lost_answers import Calls
from tests.support.pops import POP_ONE
from tests.support.waiting import patient

#: How many random sequences of steps are tried, in each of so many parts.
SEQUENCES = int(os.environ.get("PIPELINE_SEQUENCES", "60"))
PARTS = int(os.environ.get("LEDGER_PARTS", "1"))
OWNER = "w:1"
LEASE_SECONDS = 10_000.0
PIPELINE = {
    "apiVersion": "gpuflow/v1",
    "kind": "Pipeline",
    "metadata": {"name": "random"},
    "spec": {
        "taskType": "echo",
        "graph": {
            "nodes": [
                {
                    "name": "wide",
                    "spec": {"taskType": "echo", "echo": {"output": 0}},
                    "matrix": {"echo.output": [10, 20, 30]},
                },
                {
                    "name": "joined",
                    "dependsOn": ["wide"],
                    "spec": {"taskType": "echo", "echo": {"output": "${wide.results}"}},
                },
                {
                    "name": "last",
                    "dependsOn": ["joined", "wide"],
                    "spec": {"taskType": "echo", "echo": {"output": "${joined.output}"}},
                },
            ]
        },
    },
}
NEEDS = {"wide": (), "joined": ("wide",), "last": ("joined", "wide")}
PARTS_OF = {"wide": 3, "joined": 1, "last": 1}


class SlowReconcile:
    """A reconcile of another process, which stands still before each Lua step."""

    _here = threading.local()

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._may_go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._until_it_stands()

    @classmethod
    def before_a_step(cls) -> None:
        """Stand still here, if this is the thread of one."""
        slow = getattr(cls._here, "slow", None)
        if slow is not None:
            slow._stands.release()
            slow._may_go.acquire()

    def go(self, steps: int) -> None:
        """Let it take so many steps. Raises what it raised."""
        for _ in range(steps):
            if not self.is_over:
                self._may_go.release()
                self._until_it_stands()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        self._here.slow = self
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self.is_over = True
            self._stands.release()

    def _until_it_stands(self) -> None:
        assert self._stands.acquire(timeout=patient(60)), "the reconcile neither ends nor comes to a step"


@dataclass
class World:
    """A real server and app, shared by all runs of the machine."""

    broker: Any = None
    app: Any = None

    @contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        real = Script.__call__

        def gated(script: Script, client: Any, keys: Any, args: Any) -> Any:
            SlowReconcile.before_a_step()
            return real(script, client, keys, args)

        with ExitStack() as stack:  # the last one first
            self.broker = Broker(folder / "broker")
            stack.callback(self.broker.close)
            env = {"REDIS_URL": self.broker.url, "GPUFLOW_LEASE_SEC": str(LEASE_SECONDS)}
            self.app = GPUFlow("gpuflow", settings=Settings.load(env=env, cwd=folder))
            stack.callback(self.app.redis.close)
            stack.callback(self.app.close)
            stack.enter_context(patch.object(Script, "__call__", gated))
            yield


WORLD = World()


@dataclass
class Life:
    """What the model knows of one pipeline."""

    run: PipelineRun
    rounds: int = 1
    is_cancelled: bool = False
    is_gone: bool = False


@dataclass(eq=False)
class Work:
    """An attempt of a task that is under way."""

    task: str
    tag: str
    holder: Holder = field(default_factory=lambda: Holder(attempt=0, token=OWNER))


class PipelineMachine(RuleBasedStateMachine):
    pipelines = Bundle("pipelines")
    reconciles = Bundle("reconciles")
    work = Bundle("work")

    @initialize()
    def empty(self) -> None:
        self.client = WORLD.broker.client
        self.client.flushall()
        self.app = WORLD.app
        self.ledger, self.store, self.keys = self.app.ledger, self.app.pipelines, self.app.keys
        self.lives: dict[str, Life] = {}
        self.slow: list[SlowReconcile] = []
        self.calls = Calls(self.client)
        self.table = LeaseTable(self.keys, LEASE_SECONDS, owner=OWNER)
        self.table.connect(self.client, keep=False)

    # -- steps ------------------------------------------------------------------------------------------------------

    @rule(target=pipelines)
    def submit(self) -> str:
        with self.calls.of(object()):
            run = submit_pipeline(PIPELINE, app=self.app)
        self.lives[run.id] = Life(run)
        return run.id

    @rule(pipeline=pipelines)
    def reconcile(self, pipeline: str) -> None:
        with self.calls.of(("reconcile", pipeline)):
            self.app.pipeline_controller.reconcile(pipeline)

    @rule(target=reconciles, pipeline=pipelines, steps=st.integers(0, 4))
    def begin_a_slow_reconcile(self, pipeline: str, steps: int) -> Any:
        if len(self.slow) >= 3:
            return multiple()
        slow = SlowReconcile(lambda: self.app.pipeline_controller.reconcile(pipeline))
        self.slow.append(slow)
        slow.go(steps)
        return slow

    @rule(slow=reconciles, steps=st.integers(1, 6))
    def go_on(self, slow: SlowReconcile, steps: int) -> None:
        slow.go(steps)

    @rule(slow=consumes(reconciles))
    def end_a_slow_reconcile(self, slow: SlowReconcile) -> None:
        self._finish(slow)

    @rule(pipeline=pipelines, steps=st.integers(0, 6))
    def reconcile_while_another_reconciles(self, pipeline: str, steps: int) -> None:
        slow = SlowReconcile(lambda: self.app.pipeline_controller.reconcile(pipeline))
        slow.go(steps)
        self.reconcile(pipeline)
        self._finish(slow)

    @rule(pipeline=pipelines, steps=st.integers(0, 6))
    def cancel_and_resume_while_another_reconciles(self, pipeline: str, steps: int) -> None:
        slow = SlowReconcile(lambda: self.app.pipeline_controller.reconcile(pipeline))
        slow.go(steps)
        self.cancel(pipeline)
        self.resume(pipeline)
        self._finish(slow)

    @rule(target=work)
    def begin_a_task(self) -> Any:
        return self._begun() or multiple()

    @rule(work=consumes(work), success=st.booleans())
    def end_a_task(self, work: Work, success: bool) -> None:
        self._end(work, success=success)

    @rule(most=st.integers(1, 4))
    def work_on(self, most: int) -> None:
        """Run some of the tasks that wait."""
        for _ in range(most):
            work = self._begun()
            if work is not None:
                self._end(work, success=True)

    @rule(pipeline=pipelines)
    def cancel(self, pipeline: str) -> None:
        life = self.lives[pipeline]
        if life.is_gone:
            return
        before = self.store.get(pipeline)
        with self.calls.of(("cancel", pipeline)):
            ended = life.run.cancel()
        assert ended == (not before.state.final)
        life.is_cancelled |= ended

    @rule(pipeline=pipelines)
    def resume(self, pipeline: str) -> None:
        life = self.lives[pipeline]
        if life.is_gone:
            return
        before = self.store.get(pipeline)
        with self.calls.of(("resume", pipeline)):
            verdict = self.store.resume(pipeline)
        wanted = {PipelineState.RUNNING: "running", PipelineState.SUCCEEDED: "succeeded"}
        assert verdict == wanted.get(before.state, "resumed")
        if verdict == "resumed":
            life.rounds, life.is_cancelled = life.rounds + 1, False

    @rule(ago=st.integers(0, 8))
    def an_answer_was_lost(self, ago: int) -> None:
        self.calls.repeat(ago)

    @rule()
    def what_may_expire_does(self) -> None:
        """All that has a time to live is gone: much time has passed, for whoever stands still as well."""
        if any(not slow.is_over for slow in self.slow):
            return
        names = [name for name in self.client.keys("*") if self.client.pttl(name) > 0]
        if names:
            self.client.delete(*names)
        self.calls = Calls(self.client)
        for pipeline, life in self.lives.items():
            life.is_gone = self.store.find(pipeline) is None

    # -- what must always hold -----------------------------------------------------------------------------------------

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        for pipeline, life in self.lives.items():
            record = self.store.find(pipeline)
            if record is None:
                assert life.is_gone
                continue
            assert record.epoch == life.rounds
            if life.is_cancelled:
                assert record.state is PipelineState.CANCELLED
            self._stages_are_in_order(record)
            self._nothing_is_done_twice(record)

    def _stages_are_in_order(self, record: PipelineRecord) -> None:
        for name, needs in NEEDS.items():
            stage = record.stage(name)
            if stage.tasks:
                assert len(stage.tasks) == PARTS_OF[name]
                for upstream in needs:
                    assert record.stage(upstream).state is StageState.SUCCEEDED
            if stage.state is StageState.SUCCEEDED:
                for task in self.ledger.find_many(stage.tasks):
                    assert task is not None, f"a record of {name} is gone, and its pipeline is not"
                    assert task.state is TaskState.SUCCEEDED
        if record.state is PipelineState.FAILED:
            stages = [record.stage(name) for name in NEEDS]
            assert any(one.state is StageState.FAILED and one.epoch == record.epoch for one in stages), "too old"
        if record.state is PipelineState.SUCCEEDED:
            assert {record.stage(name).state for name in NEEDS} == {StageState.SUCCEEDED}

    def _nothing_is_done_twice(self, record: PipelineRecord) -> None:
        told = self._events(record.id)
        sent = Counter(tuple(event["tasks"]) for event in told if event.get("state") == StageState.DISPATCHED)
        assert set(sent.values()) <= {1}, "a stage was dispatched twice in one round"
        ends = [
            event
            for event in told
            if event["event"] == "state" and event["state"] in ("SUCCEEDED", "FAILED", "CANCELLED")
        ]
        assert len(ends) == record.epoch - (record.state is PipelineState.RUNNING)
        for task in (task for tasks in sent for task in tasks):
            ended = [
                event for event in self._events(task) if event.get("state") in ("SUCCEEDED", "FAILED", "CANCELLED")
            ]
            assert len(ended) <= 1, "a task ended twice"

    def teardown(self) -> None:
        """Bring every pipeline to its end."""
        if not hasattr(self, "slow"):
            return
        for slow in [*self.slow]:
            self._finish(slow)
        self._drive()
        for pipeline, life in self.lives.items():
            if not life.is_gone and self.store.get(pipeline).state is not PipelineState.SUCCEEDED:
                assert self.store.resume(pipeline) == "resumed"
                life.rounds, life.is_cancelled = life.rounds + 1, False
        self._drive()
        for pipeline, life in self.lives.items():
            if not life.is_gone:
                assert self.store.get(pipeline).state is PipelineState.SUCCEEDED
                self._nothing_was_lost_on_the_way(self.store.get(pipeline))
        self.all_is_as_it_must_be()

    def _drive(self) -> None:
        """Do what there is to do, as workers and the reconciler would."""
        for _ in range(10):
            for task in self.ledger.unfinished():
                self.ledger.restore(task, least_age_seconds=-1)
            for held in self.client.hkeys(self.keys.owners):  # those who hold it are gone
                self.client.zadd(self.keys.leases, {held: 1})
            self.table.sweeper.rest_seconds = 0.0
            self.table.sweeper.sweep(self.client), self.table.sweeper.sweep(self.client)
            for tag in self.table.held():
                self.table.over(tag), self.table.forget(tag)
            while (work := self._begun()) is not None:
                self._end(work, success=True)
            for pipeline in self.lives:
                self.app.pipeline_controller.reconcile(pipeline)
        for pipeline, life in self.lives.items():
            assert life.is_gone or self.store.get(pipeline).state.final, "a pipeline without an end"

    def _nothing_was_lost_on_the_way(self, record: PipelineRecord) -> None:
        (task,) = record.stage("joined").tasks
        message = json.loads(self.client.hget(self.keys.task(task), "message"))
        _, kwargs, _ = json.loads(base64.b64decode(message["body"]))
        spec = kwargs["spec"] if isinstance(kwargs["spec"], dict) else json.loads(kwargs["spec"])
        assert [result["output"] for result in spec["echo"]["output"]] == [10, 20, 30]

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _finish(self, slow: SlowReconcile) -> None:
        while not slow.is_over:
            slow.go(20)
        if slow in self.slow:
            self.slow.remove(slow)

    def _begun(self) -> Work | None:
        keys, table = self.keys, self.table
        names = [keys.leases, keys.unacked, keys.owners, keys.ready, keys.returned, keys.sweep, table.bell]
        taken = broker_script("pop")(self.client, [*names, f"{keys.prefix}cpu"], [OWNER, LEASE_SECONDS, POP_ONE])
        if not taken[0]:
            return None
        message, tag = json.loads(taken[1]), taken[4]
        if not table.accept(tag, "cpu", taken[0], taken[1], taken[5]):
            return None
        assert table.start(tag)
        work = Work(task=message["headers"]["id"], tag=tag)
        begun = self.ledger.start(work.task, worker="w", owner_token=OWNER, tag=tag, returned=taken[5])
        if begun.verdict != "begin":
            table.settle(tag, "ack")
            table.over(tag)
            return None
        work.holder = Holder(attempt=begun.attempt, token=OWNER)
        return work

    def _end(self, work: Work, *, success: bool) -> None:
        state = TaskState.SUCCEEDED if success else TaskState.FAILED
        message = json.loads(self.client.hget(self.keys.task(work.task), "message") or "null")
        if message is not None:
            _, kwargs, _ = json.loads(base64.b64decode(message["body"]))
            spec = kwargs["spec"] if isinstance(kwargs["spec"], dict) else json.loads(kwargs["spec"])
            error = None if success else {"type": "Failed", "message": "it failed"}
            result = {"output": spec["echo"]["output"]} if success else None
            with self.calls.of(work):
                self.ledger.commit(work.task, state, holder=work.holder, result=result, error=error)
        self.table.settle(work.tag, "ack")
        self.table.over(work.tag)

    def _events(self, record_id: str) -> list[dict[str, Any]]:
        return [json.loads(entry["event"]) for _, entry in self.client.xrange(self.keys.events(record_id))]


@pytest.mark.timeout(3600 + 4 * SEQUENCES)  # for one that hangs; what bounds it is the number of its steps
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pipeline_comes_to_its_end(tmp_path: Path, part: int) -> None:
    case = PipelineMachine.TestCase
    case.settings = settings(
        max_examples=SEQUENCES,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=PARTS == 1,  # the bounded run tries the same sequences each time
    )
    with WORLD.opened(tmp_path):
        case().runTest()
    print(f"\npart {part + 1} of {PARTS}: {SEQUENCES} sequences")
