"""What gpuflow costs on top of Celery, measured against Celery in the same run on the same broker.

    python benchmarks/overhead.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better):

* throughput             no-op `@app.task` calls per second: our app next to plain Celery (threads pool)
* throughput_supervised  supervised tasks per second (record, shim, child, events, commit) next to a plain Celery task
                         that starts the same child and reads its output
* latency_p50, _p99      seconds from submit to result of a no-op call on an idle worker

Ours and the peer take turns, so that a machine whose speed drifts does both the same good or harm.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

PEER = "Celery 5.7, threads pool"


def drain(results: list[Any]) -> None:
    """Wait for all results."""
    for result in results:
        result.get(timeout=300)


def throughput(noop: Any, count: int) -> float:
    """Return calls per second from the first submit to the last result."""
    started = time.perf_counter()
    drain([noop.delay() for _ in range(count)])
    return count / (time.perf_counter() - started)


def latencies(noop: Any, count: int) -> list[float]:
    """Return seconds from submit to result, one call at a time."""
    noop.delay().get(timeout=60)  # reads what the calls before have left in the client's subscription
    found = []
    for _ in range(count):
        started = time.perf_counter()
        noop.delay().get(timeout=60, interval=0.001)
        found.append(time.perf_counter() - started)
    return found


def lateness(began: Any, count: int) -> list[float]:
    """Return how long after their countdown tasks began, in seconds; countdowns are between 0.05 and 2 seconds."""
    choice = random.Random(count)
    pauses = [choice.uniform(0.05, 2.0) for _ in range(count)]
    sent = [(time.time() + pause, began.apply_async(countdown=pause)) for pause in pauses]
    return [result.get(timeout=60) - due for due, result in sent]


def supervised_ours(app: Any, count: int) -> float:
    """Return supervised echo tasks per second."""
    from gpuflow.client import submit

    started = time.perf_counter()
    tasks = [submit({"taskType": "echo", "echo": {"output": 1}}, app=app) for _ in range(count)]
    for task in tasks:
        task.get(timeout=300)
    return count / (time.perf_counter() - started)


def supervised_peer(run_child: Any, count: int) -> float:
    """Return plain Celery tasks per second, each of which starts the same child."""
    started = time.perf_counter()
    drain([run_child.delay() for _ in range(count)])
    return count / (time.perf_counter() - started)


def measure(rounds: int, calls: int, single: int, children: int, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    server, url = harness.start_broker(folder / "broker")
    os.environ["REDIS_URL"] = url
    import overhead_ours
    import overhead_peer

    jobs = str(os.cpu_count() or 2)
    workers = [
        harness.start_worker("overhead_ours", url, folder, "--max-jobs", jobs, "--name", "bench"),
        harness.start_worker("overhead_peer", url, folder, "-P", "threads"),
    ]
    try:
        harness.ready(overhead_ours.app)
        harness.ready(overhead_peer.app)
        throughput(overhead_ours.noop, 50)
        throughput(overhead_peer.noop, 50)
        supervised_ours(overhead_ours.app, 4)
        supervised_peer(overhead_peer.run_child, 4)
        rates: dict[str, list[float]] = {"ours": [], "peer": [], "ours_child": [], "peer_child": []}
        waits: dict[str, list[float]] = {"ours": [], "peer": []}
        late: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(rounds):
            rates["ours"].append(throughput(overhead_ours.noop, calls))
            rates["peer"].append(throughput(overhead_peer.noop, calls))
            waits["ours"] += latencies(overhead_ours.noop, single)
            waits["peer"] += latencies(overhead_peer.noop, single)
            late["ours"] += lateness(overhead_ours.began, single)
            late["peer"] += lateness(overhead_peer.began, single)
            rates["ours_child"].append(supervised_ours(overhead_ours.app, children))
            rates["peer_child"].append(supervised_peer(overhead_peer.run_child, children))
    finally:
        harness.stop(workers)
        server.stop()
    median = {name: statistics.median(values) for name, values in rates.items()}
    return [
        harness.row("throughput", median["ours"], median["peer"], "calls/s", more_is_better=True, peer_name=PEER),
        harness.row(
            "throughput_supervised",
            median["ours_child"],
            median["peer_child"],
            "tasks/s",
            more_is_better=True,
            peer_name="Celery task that starts the same child",
        ),
        *(
            harness.row(
                f"latency_p{percent}",
                harness.percentile(waits["ours"], percent),
                harness.percentile(waits["peer"], percent),
                "s",
                more_is_better=False,
                peer_name=PEER,
            )
            for percent in (50, 99)
        ),
        *(
            harness.row(
                f"countdown_late_p{percent}",
                harness.percentile(late["ours"], percent),
                harness.percentile(late["peer"], percent),
                "s",
                more_is_better=False,
                peer_name=PEER,
            )
            for percent in (50, 99)
        ),
    ]


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    sizes = (3, 500, 60, 60) if given.quick else (5, 1500, 200, 120)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = measure(*sizes, Path(folder))
    harness.show("overhead", rows, as_json=given.json)


if __name__ == "__main__":
    main()
