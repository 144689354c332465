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
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import pytest
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from gpuflow import batch
from gpuflow.client import PipelineRun, submit, submit_pipeline
from gpuflow.ledger.ledger import MAX_LOSSES
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check, check_orphans, leftovers
from tests.chaos.conftest import LEASE, LEASE_SECONDS
from tests.chaos.refusals import RefusingProxy
from tests.chaos.strikes import FUNCTION_KILLED, FUNCTION_SHIM_KILLED, Strikes
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
        self.strikes = Strikes()
        self.workers: dict[str, WorkerProcess] = {}
        self.frozen: dict[str, float] = {}
        self.starts = 0
        self.beat = self._start_beat()
        self.kinds: list[tuple[int, Callable[[], None]]] = [
            (5, self.kill_worker),
            (5, self.kill_child),
            (8, self.kill_function),
            (3, self.freeze_worker),
            (3, self.cut_connections),
            (2, self.restart_broker),
            (2, self.drain_worker),
            (2, self.cold_stop_worker),
            (1, self.kill_beat),
            (2, self.kill_shim),
            (2, self.kill_shim_of_function),
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
            self.strikes.end("commands refused")
            self.refused_until = None
        if self.full_until is not None and time.monotonic() >= self.full_until:
            self.proxy.end()
            self.strikes.end("broker's disk full")
            self.full_until = None
        if self.lost_until is not None and time.monotonic() >= self.lost_until:
            self.proxy.cut()
            self.lost_until = None
        for name, until in list(self.frozen.items()):
            if time.monotonic() >= until:
                del self.frozen[name]
                self.workers[name].send(signal.SIGCONT)
                self.strikes.end("worker frozen", name)
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
        self.choice.choices(actions, weights=weights)[0]()

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

    def kill_worker(self) -> None:
        self._signal(signal.SIGKILL, "worker killed")

    def drain_worker(self) -> None:
        self._signal(signal.SIGTERM, "worker drained")

    def cold_stop_worker(self) -> None:
        self._signal(signal.SIGQUIT, "worker stopped cold")

    def freeze_worker(self) -> None:
        worker = self._awake()
        if worker is None:
            return
        self.strikes.begin("worker frozen", worker.name)
        worker.send(signal.SIGSTOP)
        self.frozen[worker.name] = time.monotonic() + LEASE_SECONDS * self.choice.uniform(0.5, 2.0)

    def kill_child(self) -> None:
        self._kill_one(EXECUTOR, "child killed")

    def kill_function(self) -> None:
        self._kill_one(self.choice.choice([FUNCTION, WARM_FUNCTION]), FUNCTION_KILLED)

    def kill_shim(self) -> None:
        self._kill_shim_of(EXECUTOR, "shim killed")

    def kill_shim_of_function(self) -> None:
        self._kill_shim_of(self.choice.choice([FUNCTION, WARM_FUNCTION]), FUNCTION_SHIM_KILLED)

    def _kill_one(self, program: tuple[str, ...], what: str) -> None:
        """Kill a child that runs this program, on any worker that has one."""
        found = self._running(program)
        if not found:
            return
        worker, child = self.choice.choice(found)
        self.strikes.note(what, worker.name)
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
            child.kill()

    def _kill_shim_of(self, program: tuple[str, ...], what: str) -> None:
        found = self._running(program)
        if not found:
            return
        worker, child = self.choice.choice(found)
        try:
            shim = child.parent()
            if shim is None or shim.pid == worker.pid or worker.pid not in map(_pid, shim.parents()):
                return
        except psutil.NoSuchProcess:
            return
        self.strikes.note(what, worker.name)
        shim.kill()

    def _running(self, program: tuple[str, ...]) -> list[tuple[WorkerProcess, psutil.Process]]:
        """Return the children that run a program, with their workers; of workers that are not frozen."""
        return [
            (worker, child)
            for name, worker in sorted(self.workers.items())
            if name not in self.frozen and worker.process.poll() is None
            for child in worker.children()
            if _runs(child, program)
        ]

    def refuse_commands(self) -> None:
        if self.refused_until is not None:
            return
        self.strikes.begin("commands refused")
        self.fleet.broker.client.config_set("min-replicas-to-write", 1)
        self.refused_until = time.monotonic() + LEASE_SECONDS * self.choice.uniform(0.3, 1.5)

    def fill_the_disk(self) -> None:
        if self.full_until is not None:
            return
        self.strikes.begin("broker's disk full")
        self.proxy.begin(FULL_DISK, sys.maxsize)
        self.full_until = time.monotonic() + LEASE_SECONDS * self.choice.uniform(0.3, 1.5)

    def lose_answers(self) -> None:
        self.strikes.note("answers lost")
        self.proxy.lose_answers()
        self.lost_until = time.monotonic() + self.choice.uniform(0.05, 0.5)

    def poison_a_queue(self) -> None:
        if self.refused_until is not None:  # the broker takes nothing of us either
            return
        self.poisons += 1
        message = {"body": "", "headers": {"x": {"__type__": "x", "__value__": 1}}}
        properties = {"delivery_tag": f"poison-{self.poisons}", "delivery_info": {}}
        self.fleet.broker.client.lpush("cpu", json.dumps({**message, "properties": properties}))
        self.strikes.note("message poisoned")

    def cut_connections(self) -> None:
        self.strikes.note("connections cut")
        self.proxy.cut()

    def restart_broker(self) -> None:
        self.strikes.begin("broker killed")
        self.fleet.broker.kill()
        self.fleet.broker.restart()
        self.strikes.end("broker killed")

    def kill_beat(self) -> None:
        self.strikes.note("beat killed")
        self.beat.kill()
        self.beat.wait(timeout=patient(30))

    def _signal(self, number: signal.Signals, what: str) -> None:
        worker = self._awake()
        if worker is not None:
            self.strikes.note(what, worker.name)
            worker.send(number)

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


#: The end of the command lines of the children of executors, of functions, and of functions that stay warm.
EXECUTOR = ("-m", "executors")
FUNCTION = ("-m", "gpuflow.functions")
WARM_FUNCTION = ("-m", "gpuflow.functions", "session")


def _runs(process: psutil.Process, program: tuple[str, ...]) -> bool:
    try:
        return tuple(process.cmdline()[-len(program) :]) == program
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


def run_elsewhere(number: int, seconds: float) -> list[int]:
    """Stand for a function that the workers have."""
    raise AssertionError("it runs in a worker")


class Submitted:
    """What was submitted, and the keeping of its records: they go so soon that the test could not read them."""

    def __init__(self, fleet: TestFleet, choice: random.Random) -> None:
        self.fleet, self.choice = fleet, choice
        self.echoes: list[str] = []
        self.calls: dict[str, int] = {}
        self.culprits: list[str] = []
        #: Functions of a team in children, each with a GPU, two of three warm: task -> what it returns.
        self.functions: dict[str, int] = {}
        self.warm: set[str] = set()
        task = fleet.app.task
        self.on_gpu = [
            task(name="team_functions.on_gpu", resources="A100:1")(run_elsewhere),
            task(name="team_functions.warm_on_gpu", resources="A100:1", keep_warm="5s")(run_elsewhere),
            task(name="team_functions.batched_on_gpu", resources="A100:1", keep_warm="5s", batch=batch(4, "0.2s"))(
                run_elsewhere
            ),
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
        if number % 6 == 5:
            self._call(number)
        echo = self.fleet.echo(output=number, sleep_seconds=self.choice.choice([0, 0, 0.1, 0.5, 2.0]))
        resources = {"resources": {"accelerators": "A100:1"}} if number % 2 else {}
        self.echoes.append(submit({**echo, "retry": RETRY, **resources}, app=app).id)

    def _call(self, number: int) -> None:
        """Send a function; unlike `submit`, Celery's own call does not wait for a broker that is away."""
        task_id, pauses = uuid.uuid4().hex, threading.Event()
        kind, seconds = number // 6 % len(self.on_gpu), self.choice.choice([0, 0.2, 1.0, 2.0])
        while True:
            try:
                self.on_gpu[kind].apply_async((number, seconds), task_id=task_id)
                break
            except (RedisError, OperationalError):
                pauses.wait(0.5)
        self.functions[task_id] = number
        if kind:
            self.warm.add(task_id)

    def keep(self) -> None:
        """Let what has ended be kept, though the time for that is so short.

        Its time grows and has an end as before: the results folder of a record that never expires would be removed.
        """
        keys = self.fleet.app.keys
        pipe = self.fleet.broker.client.pipeline(transaction=False)
        for run in list(self.runs):
            for key in (keys.pipeline(run.id), keys.stages(run.id), keys.events(run.id)):
                pipe.expire(key, KEPT_SECONDS, gt=True)
        for task in [*self.echoes, *self.calls, *self.culprits, *self.functions, *stages_of(list(self.runs))]:
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
            beaten = [run for run in given.runs if run.record().state != "SUCCEEDED"]
            for run in beaten:
                assert worn_out(fleet, run), ended_badly(fleet, run)
            ledger = fleet.app.ledger
            eventually(lambda: len(ledger.unreadable(10_000)) == storm.poisons, what="every poisoned message put aside")
            assert all("Unsupported type" in one["why"] for one in ledger.unreadable(10_000))
            ledger.forget_unreadable()
            of_beaten = known(fleet, stages_of(beaten))
            good = [*given.echoes, *given.calls, *stages_of(run for run in given.runs if run not in beaten)]
            everything = [*good, *given.culprits, *given.functions, *of_beaten]
            eventually(lambda: given.keep() or ended(fleet, everything), within=180, what="every end")
            records = check(fleet, good, within=180)
            dead = check(fleet, given.culprits, state=TaskState.DEAD, within=180)
            called = check(fleet, list(given.functions), state=None, within=180)
            stopped = check(fleet, of_beaten, state=None, within=180)
        finally:
            storm.close()
    outputs = {record.id: record.result for record in records}
    assert [outputs[task]["output"] for task in given.echoes] == list(range(TASKS))
    assert {task: outputs[task]["items"][0]["output"] for task in given.calls} == {
        task: str(number) for task, number in given.calls.items()
    }
    whole = [run for run in given.runs if run not in beaten]
    assert [run["d"].result["output"] for run in whole] == [run["a"].result["output"] for run in whole]
    # As with Celery, a function whose process was killed has failed, at once and once.
    killed = [one for one in called if one.state is not TaskState.SUCCEEDED]
    assert {str((one.error or {}).get("type")) for one in killed} <= {"ChildKilled", "ChildLost"}
    assert {one.id: one.result["value"] for one in called if one.result} == {
        task: [number, 1] for task, number in given.functions.items() if task not in {one.id for one in killed}
    }
    check_orphans(fleet, everything, within=0)
    outcomes = Counter(
        entry.outcome for one in [*records, *dead, *called, *stopped] for entry in fleet.app.ledger.attempts(one.id)
    )
    print(
        f"\nsoak: seed {SEED}, {SECONDS:g} s, {TASKS} tasks, {len(given.calls)} calls, {len(given.culprits)} that kill "
        f"their engine, {len(called)} functions ({len(killed)} killed), {len(given.runs)} pipelines, "
        f"{len(beaten)} of them with a task that was lost {MAX_LOSSES} times, {storm.starts} worker starts"
    )
    for kind, count in sorted(storm.strikes.counts().items()):
        print(f"  fault    {kind:<22}{count:>6}")
    for kind, count in sorted(outcomes.items()):
        print(f"  attempt  {kind:<22}{count:>6}")
    # A call is lost with the engine of a session, which others end, too.
    alone = [*given.echoes, *given.functions, *stages_of(given.runs)]
    unexplained = storm.strikes.unexplained({task: fleet.app.ledger.attempts(task) for task in alone})
    promised(unexplained == [], "attempts lost for nothing:\n  " + "\n  ".join(unexplained))
    for_nothing = storm.strikes.unexplained_failures({one.id: fleet.app.ledger.attempts(one.id) for one in killed})
    promised(for_nothing == [], "functions failed for nothing:\n  " + "\n  ".join(for_nothing))
    spans = spans_in(fleet.folder / "spans")
    warm = [one for one in spans if one.name.partition("/")[0] in given.warm]
    held = [*of_sessions(warm), *(one for one in spans if one not in warm)]
    promised(double_bookings(held) == [], f"GPUs of two attempts at once: {double_bookings(held)}")
    asked = {task: number % 2 for number, task in enumerate(given.echoes)} | dict.fromkeys(given.functions, 1)
    wrong = [one for one in spans if len(one.gpus) != asked.get(one.name.partition("/")[0], 0)]
    promised(wrong == [], f"attempts with other GPUs than they asked for: {wrong}")
    print(f"  {len(spans)} attempts seen to their end: without their GPUs 0, double-booked 0")
    print("  lost 0, committed twice 0, orphans 0, pipelines without an end 0")


def stages_of(runs: Iterable[PipelineRun]) -> list[str]:
    return [task for run in runs for stage in run.record().stages.values() for task in stage.tasks]


def known(fleet: TestFleet, tasks: list[str]) -> list[str]:
    """Return those of the tasks that have ever been sent: a pipeline that has failed sends no more."""
    return [one.id for one in fleet.app.ledger.find_many(tasks) if one is not None]


def worn_out(fleet: TestFleet, run: PipelineRun) -> bool:
    """Whether a task of a pipeline was lost so often that it is given up: a stage of 18 s may meet ten in a row."""
    found = fleet.app.ledger.find_many(stages_of([run]))
    return any(one is not None and one.state is TaskState.DEAD and one.losses == MAX_LOSSES for one in found)


def ended_badly(fleet: TestFleet, run: PipelineRun) -> str:
    """Return what became of the stages and tasks of a pipeline that failed."""
    record = run.record()
    lines = [f"{record.id} ended {record.state}: {record.error}"]
    for name, stage in record.stages.items():
        lines.append(f"  stage {name}: {stage.state} {stage.error}")
        for task in stage.tasks:
            one = fleet.app.ledger.find(task)
            outcomes = [
                f"{e.outcome}@{e.worker} {e.started_at:.2f} to {e.ended_at:.2f} {e.error}"
                for e in fleet.app.ledger.attempts(task)
            ]
            lines.append(f"    {task}: {one.state if one else None} {one.error if one else ''} {outcomes}")
    return "\n".join(lines)


def ended(fleet: TestFleet, tasks: list[str]) -> bool:
    records = fleet.app.ledger.find_many(tasks)
    return all(record is not None and record.state.final for record in records) and not leftovers(fleet)
