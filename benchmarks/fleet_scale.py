"""What a fleet costs its one Redis: per idle worker, per task, per requirement; and where that ends.

    python benchmarks/fleet_scale.py [--quick] [--json]

10,000 tasks over 50, 1,000 and 5,000 distinct requirements, 200 workers; besides, 50 workers with as many tasks each,
and 100 that are idle. The workers are simulated (fleet_clients.py): the classes of a real worker on a real broker,
without Celery and without children. Ten real ones are measured next to ten simulated ones first. Commands are those
that the server counts, those inside Lua steps included. Progress goes to standard error.

Rows (a ratio above 1 means that ours, or the larger fleet, is better):

* cost_per_worker_flat     commands per second of an idle worker, largest fleet next to the smallest
* cost_per_task_flat       commands of a task from pop to acknowledgement, the same; each worker has as many tasks
* redis_time_..._flat      the same two as time of the server's core
* submit_rate_flat         submits per second of one process, the same; of the first 1,000 tasks, one by one. The others
                           are copies of these, queued in pipelines (fleet_bulk.py)
* submit_rate_N            submits per second over N requirements, next to the fewest
* idle_latency_..._N       seconds from submit to pop over N requirements, next to the fewest, on an idle fleet;
                           `loaded`: of a task of priority 9 while every worker is busy
* memory_...               bytes of Redis for each worker, and for each queued task
* ..._per_worker_N         the first rows for the fleet between
* idle_commands, ...       a real idle worker next to one of stock Celery that is given as many queues
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import psutil
from fleet_bulk import recorded, send
from fleet_clients import ACCELERATORS
from fleet_handle import Clients, live, wait_until
from fleet_meter import Meter, Reading
from fleet_report import extrapolate, rows_of, say, show_check

#: Seconds between two tasks of priority 9 while the fleet is busy, and between two on an idle one.
LOADED_EVERY = 0.25
IDLE_EVERY = 0.02
#: What has just started or ended has so long to come to rest.
SETTLE_SECONDS = 1.0
MODEL = {"source": {"type": "huggingface", "identifier": "HuggingFaceTB/SmolLM2-135M-Instruct"}}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    fleets: tuple[int, ...] = (50, 100, 200)
    tasks_per_worker: int = 50
    task_seconds: float = 0.4
    requirements: tuple[int, ...] = (50, 1000, 5000)
    real: int = 10
    idle_seconds: float = 5.0
    probes: int = 120
    submits: int = 1000


QUICK = Sizes(
    fleets=(10, 40),
    tasks_per_worker=6,
    task_seconds=0.2,
    requirements=(10, 50, 50),
    real=2,
    idle_seconds=1.5,
    probes=30,
    submits=60,
)


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
        resources: dict[str, Any] = {"hardware": {"memory": f"{self.memory_mib(which)}Mi"}}
        if accelerator := ACCELERATORS[which % len(ACCELERATORS)]:
            resources["accelerators"] = accelerator
        spec = {"taskType": "inference", "model": MODEL, "data": {"items": ["Hello"]}, "resources": resources}
        return spec if priority is None else {**spec, "priority": priority}

    def memory_mib(self, which: int) -> int:
        """Return what sets one requirement of this run apart from all others."""
        return 1024 + self._asked + which

    def submit(self, *args: Any) -> str:
        """Submit one task; returns its id."""
        from gpuflow.client import submit

        at = time.time()
        task = submit(self.spec(*args), app=self.app)
        self.sent[task.id] = at
        return task.id

    def run(self, workers: int, kinds: int, *, load: bool = True) -> Run:
        """Queue the tasks with all workers closed, open them, and wait for the end; then look at the idle fleet."""
        run = Run(workers=workers, requirements=kinds)
        if load:
            self.load(run)
        self.look_idle(run)
        self._asked += kinds
        return run

    def load(self, run: Run) -> None:
        """Measure the submits, then the fleet that serves what was queued."""
        clients, meter, sizes = self.clients, self.meter, self.sizes
        run.tasks = sizes.tasks_per_worker * run.workers
        clients.tell("closed")
        harness.progress(f"queueing {run.tasks} tasks over {run.requirements} requirements for {run.workers} workers")
        before = meter.read()
        self.queue(run)
        run.submitted = meter.since(before)
        clients.begin()
        clients.tell(f"pause {sizes.task_seconds}")
        before = meter.read()
        clients.tell("open")
        urgent: list[str] = []
        most = int(sizes.tasks_per_worker * sizes.task_seconds / LOADED_EVERY * 0.7)
        while len(urgent) < most:
            urgent.append(self.submit(len(urgent), run.requirements, 9))
            time.sleep(LOADED_EVERY)
        clients.wait_for(run.tasks + len(urgent))
        run.served = meter.since(before)
        run.tasks += len(urgent)
        run.loaded_latency = self.waits(urgent)

    def queue(self, run: Run) -> None:
        """Submit the first tasks one by one, and queue the rest as copies of the first of each accelerator."""
        count = min(self.sizes.submits, run.tasks)
        with recorded() as seen:
            started = time.perf_counter()
            for number in range(count):
                self.submit(number, run.requirements)
            run.submit_rate = count / (time.perf_counter() - started)
        copies = (
            seen[which % len(ACCELERATORS)].copy(self.memory_mib(which))
            for which in (number % run.requirements for number in range(count, run.tasks))
        )
        send(self.app.redis, copies, lambda sent: None if sent % 2500 else harness.progress(f"{count + sent} queued"))

    def look_idle(self, run: Run) -> None:
        """Measure the fleet while it has nothing to do, then how fast it takes single tasks."""
        self.clients.tell("pause 0")
        time.sleep(SETTLE_SECONDS)
        harness.progress(f"{run.workers} workers are idle")
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
            harness.progress(f"starting simulated workers, up to {workers}")
            self.clients.grow(workers, self.registry)
            time.sleep(SETTLE_SECONDS)
            grown = self.meter.read().memory_bytes - empty
            if not runs:
                self.warm_up()
            before = self.meter.read().memory_bytes
            runs.append(self.run(workers, usual, load=workers in (self.sizes.fleets[0], self.sizes.fleets[-1])))
            runs[-1].fleet_bytes = grown
            say(runs[-1])
            empty += self.meter.read().memory_bytes - before
        others = [kinds for kinds in (fewest, most) if kinds != usual]
        for kinds in others:
            runs.append(self.run(self.sizes.fleets[-1], kinds))
            say(runs[-1])
        self.clients.stop()
        return runs

    def warm_up(self) -> None:
        """Submit a few tasks, so that everything is loaded and connected."""
        self.clients.begin()
        for number in range(len(ACCELERATORS)):
            self.submit(number, len(ACCELERATORS))
        self.clients.wait_for(len(ACCELERATORS))
        self._asked += len(ACCELERATORS)

    def check(self) -> dict[str, Any]:
        """Measure real idle workers, as many simulated ones, and a stock worker with many queues."""
        count, found = self.sizes.real, {}
        found["alone"] = self.meter.over(self.sizes.idle_seconds)
        before = self.meter.read()
        workers = [
            harness.start_worker("gpuflow", self.url, self.folder, "--name", f"real-{number}", "--max-jobs", "1")
            for number in range(count)
        ]
        harness.progress(f"starting {count} real workers")
        try:
            wait_until(lambda: live(self.registry) >= count, f"{count} real workers are in the registry")
            time.sleep(SETTLE_SECONDS)
            found["real_growth"] = self.meter.since(before)
            found["rss_bytes"] = sum(psutil.Process(worker.pid).memory_info().rss for worker in workers) / count
            found["real"] = self.meter.over(self.sizes.idle_seconds)
        finally:
            harness.stop(workers)
        harness.progress(f"{count} simulated workers, then one of stock Celery")
        self.clients.grow(count, self.registry)
        time.sleep(SETTLE_SECONDS)
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
            time.sleep(SETTLE_SECONDS)
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
