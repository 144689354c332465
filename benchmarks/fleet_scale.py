"""What a fleet costs its one Redis: per idle worker, per task, per requirement; and where that ends.

    python benchmarks/fleet_scale.py [--quick] [--json]

10,000 tasks over 50, 1,000 and 5,000 distinct requirements, 200 workers, and fleets of 50 and 100 besides. The workers
are simulated (fleet_clients.py): the classes of a real worker on a real broker, without Celery and without children.
Ten real ones are measured next to ten simulated ones first. Commands are those that the server counts, those inside
Lua steps included.

Rows (a ratio above 1 means that ours, or the larger fleet, is better):

* cost_per_worker_flat     commands per second of an idle worker, largest fleet next to the smallest
* cost_per_task_flat       commands of a task from pop to acknowledgement, the same; each worker has as many tasks
* redis_time_..._flat      the same two as time of the server's core
* submit_rate_flat         submits per second of one process, the same
* submit_rate_N            submits per second over N requirements, next to the fewest
* latency_..._N            seconds from submit to pop over N requirements, next to the fewest: on an idle fleet, and
                           `loaded` of a task of priority 9 while every worker is busy
* memory_...               bytes of Redis for each worker, and for each queued task
* idle_...                 an idle worker next to one of stock Celery that is given as many queues
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import psutil
from fleet_clients import ACCELERATORS
from fleet_meter import Meter, Reading
from fleet_report import extrapolate, rows_of, show_check

#: A simulated task lasts so long, in seconds.
TASK_SECONDS = 0.4
#: Simulated workers of one process.
PER_PROCESS = 50
#: Seconds between two tasks of priority 9 while the fleet is busy, and between two on an idle one.
LOADED_EVERY = 0.25
IDLE_EVERY = 0.02
DEADLINE_SECONDS = 120.0
MODEL = {"source": {"type": "huggingface", "identifier": "HuggingFaceTB/SmolLM2-135M-Instruct"}}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    fleets: tuple[int, ...] = (50, 100, 200)
    tasks_per_worker: int = 50
    requirements: tuple[int, ...] = (50, 1000, 5000)
    real: int = 10
    idle_seconds: float = 8.0
    probes: int = 150


QUICK = Sizes(fleets=(10, 20, 40), tasks_per_worker=10, requirements=(10, 50, 200), real=2, idle_seconds=3, probes=50)


@dataclass(kw_only=True)
class Run:
    """What was measured with one fleet and one number of requirements."""

    workers: int
    requirements: int
    tasks: int = 0
    submit_rate: float = 0.0
    submitted: Reading | None = None
    served: Reading | None = None
    idle: Reading | None = None
    idle_latency: list[float] = field(default_factory=list)
    loaded_latency: list[float] = field(default_factory=list)
    registry_seconds: float = 0.0
    fleet_bytes: float = 0.0


class Clients:
    """All simulated workers."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.count = 0
        self.taken: dict[str, float] = {}
        self._done = 0
        self._processes: list[subprocess.Popen[str]] = []

    def grow(self, count: int, registry: Any) -> None:
        """Start more, up to `count` in all, and wait until they are in the registry."""
        while self.count < count:
            more = min(PER_PROCESS, count - self.count)
            command = [sys.executable, str(harness.HERE / "fleet_clients.py"), self.url, str(self.folder)]
            with (self.folder / "clients.log").open("ab") as log:
                process = subprocess.Popen(
                    [*command, str(self.count), str(more)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self._processes.append(process)
            self.count += more
        wait_until(lambda: live(registry) >= count, f"{count} simulated workers are in the registry")

    def tell(self, word: str) -> int:
        """Tell all of them a word; note what they took, and return how many tasks they have done since `begin`."""
        done = 0
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            answer = json.loads(process.stdout.readline())
            done += answer["done"]
            self.taken.update(answer["taken"])
        return done - self._done

    def begin(self) -> None:
        """Count from here."""
        self._done += self.tell("report")
        self.taken.clear()

    def wait_for(self, count: int) -> None:
        """Wait until so many tasks are done since `begin`."""
        wait_until(lambda: self.tell("report") >= count, f"{count} tasks are done")

    def stop(self) -> None:
        """End all."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=20)
        self._processes.clear()
        self.count = self._done = 0


def wait_until(condition: Any, what: str) -> None:
    """Wait for a condition, no longer than a deadline."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"not within {DEADLINE_SECONDS:g} s: {what}")
        time.sleep(0.1)


def live(registry: Any) -> int:
    """Return how many live workers the registry has."""
    return sum(entry.state in ("IDLE", "BUSY") for entry in registry.workers())


class Bench:
    """The broker, an app that submits, and all that is measured on them."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder, self.sizes = folder, sizes
        self.server, self.url = harness.start_broker(folder / "broker")
        os.environ.update(REDIS_URL=self.url, GPUFLOW_STATE_DIR=str(folder / "state"), RESULTS_DIR=str(folder))
        from gpuflow.celery_app import app
        from gpuflow.fleet.registry import Fleet

        self.app = app
        self.registry = Fleet(app.redis, app.keys)
        self.meter = Meter(self.url)
        self.clients = Clients(self.url, folder)
        self._asked = 0
        self.sent: dict[str, float] = {}

    def spec(self, number: int, kinds: int, priority: int | None = None) -> dict[str, Any]:
        """Return the spec of a task: the requirements take turns, and are others than those of every run before."""
        which = number % kinds
        resources: dict[str, Any] = {"hardware": {"memory": f"{1024 + self._asked + which}Mi"}}
        if ACCELERATORS[which % len(ACCELERATORS)]:
            resources["accelerators"] = ACCELERATORS[which % len(ACCELERATORS)]
        spec = {"taskType": "inference", "model": MODEL, "data": {"items": ["Hello"]}, "resources": resources}
        return spec if priority is None else {**spec, "priority": priority}

    def submit(self, *args: Any) -> str:
        """Submit one task; returns its id."""
        from gpuflow.client import submit

        at = time.time()
        task = submit(self.spec(*args), app=self.app)
        self.sent[task.id] = at
        return task.id

    def run(self, workers: int, kinds: int) -> Run:
        """Queue the tasks with all workers closed, open them, and wait for the end; then look at the idle fleet."""
        run = Run(workers=workers, requirements=kinds, tasks=self.sizes.tasks_per_worker * workers)
        clients, meter = self.clients, self.meter
        clients.tell("closed")
        before, started = meter.read(), time.perf_counter()
        for number in range(run.tasks):
            self.submit(number, kinds)
        run.submit_rate = run.tasks / (time.perf_counter() - started)
        run.submitted = meter.since(before)
        clients.begin()
        clients.tell(f"pause {TASK_SECONDS}")
        before = meter.read()
        clients.tell("open")
        urgent: list[str] = []
        most = int(run.tasks * TASK_SECONDS / workers / LOADED_EVERY * 0.7)
        while len(urgent) < most:
            urgent.append(self.submit(len(urgent), kinds, 9))
            time.sleep(LOADED_EVERY)
        clients.wait_for(run.tasks + len(urgent))
        run.served = meter.since(before)
        run.tasks += len(urgent)
        run.loaded_latency = self.waits(urgent)
        self.look_idle(run)
        say(run)
        self._asked += kinds
        return run

    def look_idle(self, run: Run) -> None:
        """Measure the fleet while it has nothing to do, then how fast it takes single tasks."""
        self.clients.tell("pause 0")
        time.sleep(1.5)
        run.idle = self.meter.over(self.sizes.idle_seconds)
        started = time.perf_counter()
        self.registry.workers()
        run.registry_seconds = time.perf_counter() - started
        self.clients.begin()
        probes = []
        for number in range(self.sizes.probes):
            probes.append(self.submit(number, run.requirements))
            time.sleep(IDLE_EVERY)
        self.clients.wait_for(len(probes))
        run.idle_latency = self.waits(probes)

    def waits(self, tasks: list[str]) -> list[float]:
        """Return the seconds from submit to pop of these tasks."""
        return [self.clients.taken[task] - self.sent[task] for task in tasks]

    def all_runs(self) -> list[Run]:
        """Grow the fleet and measure each size; then the other numbers of requirements with the largest."""
        fewest, usual, most = self.sizes.requirements
        runs = []
        empty = self.meter.read().memory_bytes
        for workers in self.sizes.fleets:
            self.clients.grow(workers, self.registry)
            time.sleep(1.5)
            grown = self.meter.read().memory_bytes - empty
            before = self.meter.read().memory_bytes
            runs.append(self.run(workers, usual))
            runs[-1].fleet_bytes = grown
            empty += self.meter.read().memory_bytes - before
        runs += [self.run(self.sizes.fleets[-1], kinds) for kinds in (fewest, most)]
        self.clients.stop()
        return runs

    def check(self) -> dict[str, Any]:
        """Measure real idle workers, as many simulated ones, and a stock worker with many queues."""
        count, found = self.sizes.real, {}
        before = self.meter.read()
        workers = [
            harness.start_worker("gpuflow", self.url, self.folder, "--name", f"real-{number}", "--max-jobs", "1")
            for number in range(count)
        ]
        try:
            wait_until(lambda: live(self.registry) >= count, f"{count} real workers are in the registry")
            time.sleep(3)
            found["real_growth"] = self.meter.since(before)
            found["rss_bytes"] = sum(psutil.Process(worker.pid).memory_info().rss for worker in workers) / count
            found["real"] = self.meter.over(self.sizes.idle_seconds)
        finally:
            harness.stop(workers)
        self.clients.grow(count, self.registry)
        time.sleep(3)
        found["simulated"] = self.meter.over(self.sizes.idle_seconds)
        self.clients.stop()
        found["stock"] = self.stock()
        found["speed"] = self.meter.speed()
        found["maxclients"] = int(self.meter.client.config_get("maxclients")["maxclients"])
        return found

    def stock(self) -> Reading:
        """Measure one idle worker of stock Celery that consumes as many queues as there are requirements."""
        import overhead_peer

        names = ",".join(f"peer-{number}" for number in range(self.sizes.requirements[1]))
        worker = harness.start_worker("overhead_peer", self.url, self.folder, "-P", "threads", "-Q", names)
        try:
            harness.ready(overhead_peer.app)
            time.sleep(2)
            return self.meter.over(self.sizes.idle_seconds)
        finally:
            harness.stop([worker])
            overhead_peer.app.close()

    def close(self) -> None:
        """End everything."""
        self.clients.stop()
        self.meter.close()
        self.app.close()
        self.app.redis.close()
        self.server.stop()


def say(run: Run) -> None:
    """Print a line on one run."""
    assert run.idle is not None
    assert run.served is not None
    print(
        f"{run.workers:>4} workers, {run.requirements:>5} requirements, {run.tasks:>6} tasks: "
        f"{run.submit_rate:.0f} submits/s; {run.tasks / run.served.seconds:.0f} tasks/s, "
        f"{run.served.commands / run.tasks:.0f} commands and {run.served.cpu_seconds / run.tasks * 1e3:.2f} ms of Redis "
        f"each; idle {run.idle.commands / run.idle.seconds / run.workers:.1f} commands/s each",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    sizes = QUICK if given.quick else Sizes()
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        bench = Bench(Path(folder), sizes)
        try:
            check = bench.check()
            show_check(check, sizes.real)
            runs = bench.all_runs()
        finally:
            bench.close()
    extrapolate(runs, check, sizes.real)
    harness.show("fleet_scale", rows_of(runs, check, sizes), as_json=given.json)


if __name__ == "__main__":
    main()
