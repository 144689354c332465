"""Many tasks and pipelines under random faults: nothing lost, nothing twice, nothing left.

The seed, the length and the sizes come from SOAK_SEED, SOAK_SECONDS, SOAK_TASKS and SOAK_PIPELINES; `tox -e soak` runs
the long one. The table of faults and outcomes is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from gpuflow.client import PipelineRun, submit, submit_pipeline
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check, check_orphans, leftovers
from tests.chaos.conftest import LEASE, LEASE_SECONDS
from tests.chaos.refusals import RefusingProxy
from tests.fixtures.simulated_nvml import simulated_machine
from tests.support.attempt_spans import spans_in
from tests.support.engines import SCRIPTED, build
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.spans import double_bookings, of_sessions
from tests.support.waiting import eventually, patient, promised

#: Three workers that are killed and started again all the time: nothing else should load the machine.
pytestmark = pytest.mark.alone

SECONDS = float(os.environ.get("SOAK_SECONDS", "45"))
TASKS = int(os.environ.get("SOAK_TASKS", "120"))
PIPELINES = int(os.environ.get("SOAK_PIPELINES", "4"))
SEED = int(os.environ.get("SOAK_SEED", "7"))
WORKERS = 3
#: A fault every so many seconds, on average.
FAULT_SECONDS = 3.0
#: Records are kept for so long after the end of their task, or of their pipeline: some of these take longer.
RETENTION_SECONDS = 12.0
#: What the test reads in the end is kept for so long instead.
KEPT_SECONDS = 86_400
FULL_DISK = "MISCONF the server is configured to save snapshots, but it is unable to persist to disk."


class Storm:
    """Keeps a fleet of workers up and brings faults over it."""

    def __init__(self, fleet: TestFleet, proxy: RefusingProxy, choice: random.Random) -> None:
        self.fleet, self.proxy, self.choice = fleet, proxy, choice
        self.faults: Counter[str] = Counter()
        self.workers: dict[str, WorkerProcess] = {}
        self.frozen: dict[str, float] = {}
        self.starts = 0
        self.beat = self._start_beat()
        self.kinds: list[tuple[int, Callable[[], str | None]]] = [
            (5, self.kill_worker),
            (5, self.kill_child),
            (3, self.freeze_worker),
            (3, self.cut_connections),
            (2, self.restart_broker),
            (2, self.drain_worker),
            (2, self.cold_stop_worker),
            (1, self.kill_beat),
            (2, self.kill_shim),
            (2, self.refuse_commands),
            (2, self.fill_the_disk),
            (3, self.lose_answers),
            (1, self.poison_a_queue),
        ]
        self.refused_until: float | None = None
        self.full_until: float | None = None
        self.lost_until: float | None = None
        self.poisons = 0
        for variant in ("cpu", "cuda"):
            build(fleet.folder / "envs", SCRIPTED, variant=variant)
        #: Half of the tasks ask for one of the GPUs of a simulated machine, which the workers share. Others are calls
        #: of warm sessions without a model.
        self.env = {
            **LEASE,
            "GPUFLOW_ENV_DIR": str(fleet.folder / "envs"),
            "GPUFLOW_STATE_DIR": str(fleet.folder / "state"),
            "GPUFLOW_RETENTION_DAYS": str(RETENTION_SECONDS / 86_400),
            **simulated_machine(fleet.folder, "3xA100-40GB"),
            "GPUFLOW_NOTICE_SEC": "1",
            "ATTEMPT_SPANS": str(fleet.folder / "spans"),
        }

    def tick(self) -> None:
        """Start workers that are gone, wake those that were frozen long enough."""
        if self.refused_until is not None and time.monotonic() >= self.refused_until:
            self.fleet.broker.client.config_set("min-replicas-to-write", 0)
            self.refused_until = None
        if self.full_until is not None and time.monotonic() >= self.full_until:
            self.proxy.end()
            self.full_until = None
        if self.lost_until is not None and time.monotonic() >= self.lost_until:
            self.proxy.cut()
            self.lost_until = None
        for name, until in list(self.frozen.items()):
            if time.monotonic() >= until:
                del self.frozen[name]
                self.workers[name].send(signal.SIGCONT)
        for number in range(WORKERS):
            name = f"w{number}"
            worker = self.workers.get(name)
            if worker is None or worker.process.poll() is not None:
                options = ("--max-jobs", "2", "--include", "attempt_spans,team_functions")
                self.workers[name] = WorkerProcess(self.proxy.url, self.fleet.folder, name, *options, env=self.env)
                self.fleet.workers.append(self.workers[name])
                self.starts += 1
        if self.beat.poll() is not None:
            self.beat = self._start_beat()

    def strike(self) -> None:
        """Bring one fault about."""
        weights, actions = zip(*self.kinds, strict=True)
        action = self.choice.choices(actions, weights=weights)[0]
        done = action()
        if done is not None:
            self.faults[done] += 1

    def calm(self) -> None:
        """No more faults; every worker is up."""
        self.frozen = dict.fromkeys(self.frozen, 0.0)
        self.refused_until = self.refused_until and 0.0
        self.full_until, self.lost_until = self.full_until and 0.0, self.lost_until and 0.0
        self.tick()

    def close(self) -> None:
        """Wake what is frozen and stop beat."""
        for name in self.frozen:
            self.workers[name].send(signal.SIGCONT)
        self.beat.kill()
        self.beat.wait(timeout=patient(30))

    def kill_worker(self) -> str | None:
        return self._signal(signal.SIGKILL, "worker killed")

    def drain_worker(self) -> str | None:
        return self._signal(signal.SIGTERM, "worker drained")

    def cold_stop_worker(self) -> str | None:
        return self._signal(signal.SIGQUIT, "worker stopped cold")

    def freeze_worker(self) -> str | None:
        worker = self._awake()
        if worker is None:
            return None
        worker.send(signal.SIGSTOP)
        self.frozen[worker.name] = time.monotonic() + LEASE_SECONDS * self.choice.uniform(0.5, 2.0)
        return "worker frozen"

    def kill_child(self) -> str | None:
        worker = self._awake()
        children = [child for child in (worker.children() if worker else []) if _executor(child)]
        if not children:
            return None
        try:
            self.choice.choice(children).kill()
        except psutil.NoSuchProcess:  # it has ended by itself
            return None
        return "child killed"

    def kill_shim(self) -> str | None:
        worker = self._awake()
        children = [child for child in (worker.children() if worker else []) if _executor(child)]
        try:
            shim = self.choice.choice(children).parent() if children else None
        except psutil.NoSuchProcess:
            return None
        if worker is None or shim is None or shim.pid == worker.pid or worker.pid not in map(_pid, shim.parents()):
            return None
        shim.kill()
        return "shim killed"

    def refuse_commands(self) -> str | None:
        if self.refused_until is None:
            self.fleet.broker.client.config_set("min-replicas-to-write", 1)
            self.refused_until = time.monotonic() + LEASE_SECONDS * self.choice.uniform(0.3, 1.5)
        return "commands refused"

    def fill_the_disk(self) -> str | None:
        if self.full_until is None:
            self.proxy.begin(FULL_DISK, sys.maxsize)
            self.full_until = time.monotonic() + LEASE_SECONDS * self.choice.uniform(0.3, 1.5)
        return "broker's disk full"

    def lose_answers(self) -> str | None:
        self.proxy.lose_answers()
        self.lost_until = time.monotonic() + self.choice.uniform(0.05, 0.5)
        return "answers lost"

    def poison_a_queue(self) -> str | None:
        if self.refused_until is not None:  # the broker takes nothing of us either
            return None
        self.poisons += 1
        message = {"body": "", "headers": {"x": {"__type__": "x", "__value__": 1}}}
        properties = {"delivery_tag": f"poison-{self.poisons}", "delivery_info": {}}
        self.fleet.broker.client.lpush("cpu", json.dumps({**message, "properties": properties}))
        return "message poisoned"

    def cut_connections(self) -> str | None:
        self.proxy.cut()
        return "connections cut"

    def restart_broker(self) -> str | None:
        self.fleet.broker.kill()
        self.fleet.broker.restart()
        return "broker killed"

    def kill_beat(self) -> str | None:
        self.beat.kill()
        self.beat.wait(timeout=patient(30))
        return "beat killed"

    def _signal(self, number: signal.Signals, what: str) -> str | None:
        worker = self._awake()
        if worker is None:
            return None
        worker.send(number)
        return what

    def _awake(self) -> WorkerProcess | None:
        awake = [
            worker
            for name, worker in sorted(self.workers.items())
            if name not in self.frozen and worker.process.poll() is None
        ]
        return self.choice.choice(awake) if awake else None

    def _start_beat(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **LEASE, "REDIS_URL": self.proxy.url}
        return subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "gpuflow", "beat", "-l", "WARNING"],
            env=environment,
            cwd=self.fleet.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _pid(process: psutil.Process) -> int:
    return process.pid


def _executor(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-2:] == ["-m", "executors"]
    except psutil.Error:
        return False


def pipeline(number: int) -> dict[str, Any]:
    longer = 1.5 * RETENTION_SECONDS if number % 3 == 0 else 0.5
    stages = [
        {"name": "a", "spec": {"echo": {"output": number, "sleep_seconds": 0.2}}},
        {"name": "b", "dependsOn": ["a"], "spec": {"echo": {"output": "${a.result.output}"}}},
        {"name": "c", "dependsOn": ["a"], "spec": {"echo": {"output": 1, "sleep_seconds": longer}}},
        {"name": "d", "dependsOn": ["b", "c"], "spec": {"echo": {"output": "${b.result.output}"}}},
    ]
    spec = {"taskType": "echo", "retry": RETRY, "graph": {"nodes": stages}}
    return {"apiVersion": "gpuflow/v1", "kind": "Pipeline", "metadata": {"name": f"p{number}"}, "spec": spec}


#: A killed child counts as a failure of its task, and a storm kills many.
RETRY = {"max_attempts": 20, "backoff_seconds": 0.2}


def call(prompt: str, **fields: Any) -> dict[str, Any]:
    """Return a call of the model that all calls share."""
    return {
        "taskType": "inference",
        "model": {"source": {"type": "local", "identifier": "/models/one"}},
        "data": {"type": "list", "items": [prompt]},
        "resources": {"hardware": {"gpu": {"count": 0}}},
        "retry": RETRY,
        **fields,
    }


def run_elsewhere(number: int) -> list[int]:
    """Stand for a function that the workers have."""
    raise AssertionError("it runs in a worker")


class Submitted:
    """What was submitted, and the keeping of its records: they go so soon that the test could not read them."""

    def __init__(self, fleet: TestFleet, choice: random.Random) -> None:
        self.fleet, self.choice = fleet, choice
        self.echoes: list[str] = []
        self.calls: dict[str, int] = {}
        self.culprits: list[str] = []
        #: Functions of a team in children, each with a GPU, half of them warm: task -> what it returns.
        self.functions: dict[str, int] = {}
        self.warm: set[str] = set()
        task = fleet.app.task
        self.on_gpu = [
            task(name="team_functions.on_gpu", resources="A100:1")(run_elsewhere),
            task(name="team_functions.warm_on_gpu", resources="A100:1", keep_warm="5s")(run_elsewhere),
        ]
        self.runs: list[PipelineRun] = []
        self.failed: list[BaseException] = []

    def submit_all(self) -> None:
        pauses = threading.Event()
        try:
            for number in range(TASKS):
                self._submit(number)
                if number % max(1, TASKS // PIPELINES) == 0:
                    self.runs.append(submit_pipeline(pipeline(number), app=self.fleet.app))
                pauses.wait(SECONDS * 0.8 / TASKS)
        except BaseException as error:
            self.failed.append(error)

    def _submit(self, number: int) -> None:
        app = self.fleet.app
        if number % 8 == 3:
            self.calls[submit(call(f"echo {number}"), app=app).id] = number
        if number % 40 == 11:
            retry = {"max_attempts": 3, "backoff_seconds": 0.2}
            self.culprits.append(submit(call("die", retry=retry), app=app).id)
        if number % 10 == 5:
            self._call(number)
        echo = self.fleet.echo(output=number, sleep_seconds=self.choice.choice([0, 0, 0.1, 0.5, 2.0]))
        resources = {"resources": {"accelerators": "A100:1"}} if number % 2 else {}
        self.echoes.append(submit({**echo, "retry": RETRY, **resources}, app=app).id)

    def _call(self, number: int) -> None:
        """Send a function; unlike `submit`, Celery's own call does not wait for a broker that is away."""
        task_id, pauses = uuid.uuid4().hex, threading.Event()
        while True:
            try:
                self.on_gpu[number // 10 % 2].apply_async((number,), task_id=task_id)
                break
            except (RedisError, OperationalError):
                pauses.wait(0.5)
        self.functions[task_id] = number
        if number // 10 % 2:
            self.warm.add(task_id)

    def of_stages(self) -> list[str]:
        return [task for run in self.runs for stage in run.record().stages.values() for task in stage.tasks]

    def keep(self) -> None:
        """Let what has ended be kept, though the time for that is so short.

        Its time grows and has an end as before: the results folder of a record that never expires would be removed.
        """
        keys = self.fleet.app.keys
        pipe = self.fleet.broker.client.pipeline(transaction=False)
        for run in list(self.runs):
            for key in (keys.pipeline(run.id), keys.stages(run.id), keys.events(run.id)):
                pipe.expire(key, KEPT_SECONDS, gt=True)
        for task in [*self.echoes, *self.calls, *self.culprits, *self.functions, *self.of_stages()]:
            for key in (keys.task(task), keys.attempts(task), keys.events(task), keys.celery_result(task)):
                pipe.expire(key, KEPT_SECONDS, gt=True)
        with contextlib.suppress(RedisError):  # it refuses that now; the next time is soon enough
            pipe.execute()


@pytest.mark.timeout(SECONDS * 2 + patient(400))
def test_a_storm_loses_nothing_and_runs_nothing_twice(fleet: TestFleet) -> None:
    given = Submitted(fleet, random.Random(SEED))
    with RefusingProxy(fleet.broker.url) as proxy:
        storm = Storm(fleet, proxy, random.Random(SEED + 1))
        try:
            producer = threading.Thread(target=given.submit_all, daemon=True)
            producer.start()
            ends = time.monotonic() + SECONDS
            strikes = keeps = time.monotonic() + 2
            while time.monotonic() < ends or producer.is_alive():
                storm.tick()
                if time.monotonic() >= strikes and time.monotonic() < ends:
                    storm.strike()
                    strikes = time.monotonic() + storm.choice.uniform(0.5, 1.5) * FAULT_SECONDS
                if time.monotonic() >= keeps:
                    given.keep()
                    keeps = time.monotonic() + RETENTION_SECONDS / 6
                producer.join(timeout=0.2)
            for error in given.failed:
                raise error
            storm.calm()

            def settled() -> bool:
                storm.tick()
                given.keep()
                return all(run.record().state.final for run in given.runs)

            eventually(settled, within=180, what="the end of every pipeline")
            for run in given.runs:
                assert run.record().state == "SUCCEEDED", ended_badly(fleet, run)
            ledger = fleet.app.ledger
            eventually(lambda: len(ledger.unreadable(10_000)) == storm.poisons, what="every poisoned message put aside")
            assert all("Unsupported type" in one["why"] for one in ledger.unreadable(10_000))
            ledger.forget_unreadable()
            good = [*given.echoes, *given.calls, *given.of_stages()]
            everything = [*good, *given.culprits, *given.functions]
            eventually(lambda: given.keep() or ended(fleet, everything), within=180, what="every end")
            records = check(fleet, good, within=180)
            dead = check(fleet, given.culprits, state=TaskState.DEAD, within=180)
            called = check(fleet, list(given.functions), state=None, within=180)
        finally:
            storm.close()
    outputs = {record.id: record.result for record in records}
    assert [outputs[task]["output"] for task in given.echoes] == list(range(TASKS))
    assert {task: outputs[task]["items"][0]["output"] for task in given.calls} == {
        task: str(number) for task, number in given.calls.items()
    }
    assert [run["d"].result["output"] for run in given.runs] == [run["a"].result["output"] for run in given.runs]
    # As with Celery, a function whose process was killed has failed, at once and once.
    killed = [one for one in called if one.state is not TaskState.SUCCEEDED]
    assert {str((one.error or {}).get("type")) for one in killed} <= {"ChildKilled", "ChildLost"}
    assert {one.id: one.result["value"] for one in called if one.result} == {
        task: [number, 1] for task, number in given.functions.items() if task not in {one.id for one in killed}
    }
    check_orphans(fleet, everything, within=0)
    outcomes = Counter(
        entry.outcome for one in [*records, *dead, *called] for entry in fleet.app.ledger.attempts(one.id)
    )
    print(
        f"\nsoak: seed {SEED}, {SECONDS:g} s, {TASKS} tasks, {len(given.calls)} calls, {len(given.culprits)} that kill "
        f"their engine, {len(called)} functions ({len(killed)} killed), {len(given.runs)} pipelines, "
        f"{storm.starts} worker starts"
    )
    for kind, count in sorted(storm.faults.items()):
        print(f"  fault    {kind:<22}{count:>6}")
    for kind, count in sorted(outcomes.items()):
        print(f"  attempt  {kind:<22}{count:>6}")
    spans = spans_in(fleet.folder / "spans")
    warm = [one for one in spans if one.name.partition("/")[0] in given.warm]
    held = [*of_sessions(warm), *(one for one in spans if one not in warm)]
    promised(double_bookings(held) == [], f"GPUs of two attempts at once: {double_bookings(held)}")
    asked = {task: number % 2 for number, task in enumerate(given.echoes)} | dict.fromkeys(given.functions, 1)
    wrong = [one for one in spans if len(one.gpus) != asked.get(one.name.partition("/")[0], 0)]
    promised(wrong == [], f"attempts with other GPUs than they asked for: {wrong}")
    print(f"  {len(spans)} attempts seen to their end: without their GPUs 0, double-booked 0")
    print("  lost 0, committed twice 0, orphans 0, pipelines without an end 0")


def ended_badly(fleet: TestFleet, run: PipelineRun) -> str:
    """Return what became of the stages and tasks of a pipeline that failed."""
    record = run.record()
    lines = [f"{record.id} ended {record.state}: {record.error}"]
    for name, stage in record.stages.items():
        lines.append(f"  stage {name}: {stage.state} {stage.error}")
        for task in stage.tasks:
            one = fleet.app.ledger.find(task)
            outcomes = [f"{e.outcome}@{e.worker} {e.error}" for e in fleet.app.ledger.attempts(task)]
            lines.append(f"    {task}: {one.state if one else None} {one.error if one else ''} {outcomes}")
    return "\n".join(lines)


def ended(fleet: TestFleet, tasks: list[str]) -> bool:
    records = fleet.app.ledger.find_many(tasks)
    return all(record is not None and record.state.final for record in records) and not leftovers(fleet)
