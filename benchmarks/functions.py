"""What a team's function in a child of its own costs, measured against Celery's own way to have one.

    python benchmarks/functions.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better):

* cold_calls    calls per second of a function that does nothing, each in a process of its own: a child with record,
                shim, events and commit next to Celery's prefork pool with --max-tasks-per-child=1

Ours and the peer take turns, so that a machine whose speed drifts does both the same good or harm.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

PEER = "Celery, prefork, --max-tasks-per-child=1"


def rate(task: Any, count: int) -> float:
    """Return calls per second from the first submit to the last result. Each must have had a process of its own."""
    started = time.perf_counter()
    pids = [result.get(timeout=300) for result in [task.delay() for _ in range(count)]]
    taken = time.perf_counter() - started
    if len(set(pids)) != count:
        raise SystemExit(f"{count} calls ran in {len(set(pids))} processes")
    return count / taken


def measure(rounds: int, calls: int, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    server, url = harness.start_broker(folder / "broker")
    os.environ["REDIS_URL"] = url
    import functions_ours
    import functions_peer

    jobs = str(os.cpu_count() or 2)
    workers = [
        harness.start_worker("functions_ours", url, folder, "--max-jobs", jobs, "--name", "bench"),
        harness.start_worker("functions_peer", url, folder, "-c", jobs, "-P", "prefork", "--max-tasks-per-child", "1"),
    ]
    sides = {"ours": functions_ours, "peer": functions_peer}
    try:
        for side in sides.values():
            harness.ready(side.app)
            rate(side.cold, 4)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            harness.progress(f"round {number + 1} of {rounds}")
            for name, side in sides.items():
                rates[name].append(rate(side.cold, calls))
    finally:
        harness.stop(workers)
        server.stop()
    ours, peer = (statistics.median(rates[name]) for name in ("ours", "peer"))
    return [harness.row("cold_calls", ours, peer, "calls/s", more_is_better=True, peer_name=PEER)]


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    sizes = (3, 20) if given.quick else (7, 60)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = measure(*sizes, Path(folder))
    harness.show("functions", rows, as_json=given.json)


if __name__ == "__main__":
    main()
