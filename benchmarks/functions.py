"""What a team's function in a child costs, measured against Celery's own ways to have one.

    python benchmarks/functions.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better):

* cold_calls     calls per second of a function that does nothing, each in a process of its own: a child with record,
                 shim, events and commit next to Celery's prefork pool with --max-tasks-per-child=1
* warm_calls     calls per second of a model that works 10 ms on each, one after the other: a function that stays warm
                 in a child next to a task of Celery's threads pool that keeps its model in a global
* warm_empty     the same of a function that does nothing: what each call of a warm one costs
* batched_calls  calls per second of 64 callers, each of which waits for its answer, of a model that works 50 ms on a
                 call or on a batch: a warm function with a batch of 64 next to one without
* memory_back    memory of the worker and all its children in MiB, at the end, when what was warm has idled out, next to
                 before the first call

Ours and the peer take turns, so that a machine whose speed drifts does both the same good or harm.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
import psutil

PREFORK = "Celery, prefork, --max-tasks-per-child=1"
THREADS = "Celery, threads, -c 1"
CALLERS = 64
#: Until everything that was warm has idled out, in seconds.
IDLE_SECONDS = 60


def cold_rate(task: Any, count: int) -> float:
    """Return calls per second from the first submit to the last result. Each must have had a process of its own."""
    started = time.perf_counter()
    pids = [result.get(timeout=300) for result in [task.delay() for _ in range(count)]]
    taken = time.perf_counter() - started
    if len(set(pids)) != count:
        raise SystemExit(f"{count} calls ran in {len(set(pids))} processes")
    return count / taken


def rate(task: Any, count: int) -> float:
    """Return calls per second from the first submit to the last result, where all are submitted at once."""
    started = time.perf_counter()
    for result in [task.delay(number) for number in range(count)]:
        result.get(timeout=300)
    return count / (time.perf_counter() - started)


def rate_of_callers(task: Any, count: int) -> float:
    """Return calls per second of callers each of which waits for its answer before it calls again."""
    answers: list[int] = []

    def call() -> None:
        for number in range(max(1, count // CALLERS)):
            answers.append(task.delay(number).get(timeout=300))

    callers = [threading.Thread(target=call) for _ in range(CALLERS)]
    started = time.perf_counter()
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    taken = time.perf_counter() - started
    if len(answers) < CALLERS:
        raise SystemExit(f"{len(answers)} calls of {CALLERS} callers were answered")
    return len(answers) / taken


def turns(rounds: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Return the median of each side, which take turns."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measured in sides.items():
            rates[name].append(measured())
    return {name: statistics.median(values) for name, values in rates.items()}


def memory_mib(worker: psutil.Process) -> float:
    """Return the memory of a worker and of all its children."""
    total = 0
    for process in (worker, *worker.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / (1 << 20)


def idled_out(worker: psutil.Process) -> None:
    """Wait until no process of a function is left."""
    end = time.monotonic() + IDLE_SECONDS
    while any("gpuflow.functions session" in " ".join(one.cmdline()) for one in worker.children(recursive=True)):
        if time.monotonic() > end:
            raise SystemExit(f"a warm function has not idled out within {IDLE_SECONDS} s")
        time.sleep(0.2)


def measure(rounds: int, calls: int, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    server, url = harness.start_broker(folder / "broker")
    os.environ["REDIS_URL"] = url
    import functions_ours as ours
    import functions_peer as peer

    jobs = str(os.cpu_count() or 2)
    mine = harness.start_worker("functions_ours", url, folder, "-c", "128", "--max-jobs", jobs, "--name", "bench")
    prefork = ("-n", "cold@%h", "-c", jobs, "-P", "prefork", "--max-tasks-per-child", "1")
    threads = ("-n", "warm@%h", "-c", "1", "-P", "threads", "-Q", peer.WARM_QUEUE)
    workers = [mine, *(harness.start_worker("functions_peer", url, folder, *pool) for pool in (prefork, threads))]
    try:
        harness.ready(ours.app)
        harness.ready(peer.app, 2)
        for side in (ours, peer):
            cold_rate(side.cold, 4)
        tree = psutil.Process(mine.pid)
        before = memory_mib(tree)
        rows = []

        def row(name: str, sides: Mapping[str, Callable[[], float]], peer_name: str) -> None:
            harness.progress(name)
            for measured in sides.values():
                measured()
            found = turns(rounds, sides)
            rows.append(
                harness.row(name, found["ours"], found["peer"], "calls/s", more_is_better=True, peer_name=peer_name)
            )

        row(
            "cold_calls",
            {"ours": lambda: cold_rate(ours.cold, calls), "peer": lambda: cold_rate(peer.cold, calls)},
            PREFORK,
        )
        for name in ("warm", "empty"):
            mine_of, its_of = getattr(ours, name), getattr(peer, name)
            row(
                "warm_calls" if name == "warm" else "warm_empty",
                {"ours": lambda one=mine_of: rate(one, 5 * calls), "peer": lambda one=its_of: rate(one, 5 * calls)},
                THREADS,
            )
        row(
            "batched_calls",
            {
                "ours": lambda: rate_of_callers(ours.batched, 10 * calls),
                "peer": lambda: rate_of_callers(ours.alone, 2 * calls),
            },
            "a warm function without a batch",
        )
        harness.progress("memory_back")
        idled_out(tree)
        rows.append(
            harness.row("memory_back", memory_mib(tree), before, "MiB", more_is_better=False, peer_name="before")
        )
    finally:
        harness.stop(workers)
        server.stop()
    return rows


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    sizes = (1, 20) if given.quick else (5, 60)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = measure(*sizes, Path(folder))
    harness.show("functions", rows, as_json=given.json)


if __name__ == "__main__":
    main()
