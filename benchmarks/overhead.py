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

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEER = "Celery 5.7, threads pool"


def start_broker(folder: Path) -> tuple[Any, str]:
    """Start a broker of our own with an append-only file."""
    from gpuflow.broker.embedded import EmbeddedServer

    server = EmbeddedServer(folder)
    return server, server.start()


def start_worker(module: str, url: str, folder: Path, *extra: str) -> subprocess.Popen[bytes]:
    """Start one Celery worker process."""
    environment = {
        **os.environ,
        "REDIS_URL": url,
        "RESULTS_DIR": str(folder / "results"),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "GPUFLOW_STATE_DIR": str(folder / "state"),
    }
    log = (folder / f"{module}.log").open("wb")
    command = [sys.executable, "-m", "celery", "-A", module, "worker", "-c", "16", "-l", "WARNING", *extra]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)


def ready(app: Any, deadline_seconds: float = 60) -> None:
    """Wait until a worker of the app answers."""
    end = time.monotonic() + deadline_seconds
    while not app.control.ping(timeout=0.5):
        if time.monotonic() > end:
            raise SystemExit(f"no worker of {app.main} answered within {deadline_seconds:g} s")


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
    found = []
    for _ in range(count):
        started = time.perf_counter()
        noop.delay().get(timeout=60, interval=0.001)
        found.append(time.perf_counter() - started)
    return found


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


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of values."""
    return statistics.quantiles(sorted(values), n=100, method="inclusive")[percent - 1]


def row(metric: str, ours: float, peer: float, unit: str, *, more_is_better: bool, peer_name: str = PEER) -> dict:
    """Return one row of the table."""
    ratio = ours / peer if more_is_better else peer / ours
    return {
        "metric": metric,
        "ours": round(ours, 5),
        "peer": round(peer, 5),
        "peer_name": peer_name,
        "unit": unit,
        "ratio": round(ratio, 3),
    }


def measure(rounds: int, calls: int, single: int, children: int, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    server, url = start_broker(folder / "broker")
    os.environ["REDIS_URL"] = url
    sys.path.insert(0, str(HERE))
    import overhead_ours
    import overhead_peer

    jobs = str(os.cpu_count() or 2)
    workers = [
        start_worker("overhead_ours", url, folder, "--max-jobs", jobs, "--name", "bench"),
        start_worker("overhead_peer", url, folder, "-P", "threads"),
    ]
    try:
        ready(overhead_ours.app)
        ready(overhead_peer.app)
        throughput(overhead_ours.noop, 50)
        throughput(overhead_peer.noop, 50)
        rates: dict[str, list[float]] = {"ours": [], "peer": [], "ours_child": [], "peer_child": []}
        waits: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(rounds):
            rates["ours"].append(throughput(overhead_ours.noop, calls))
            rates["peer"].append(throughput(overhead_peer.noop, calls))
            waits["ours"] += latencies(overhead_ours.noop, single)
            waits["peer"] += latencies(overhead_peer.noop, single)
            rates["ours_child"].append(supervised_ours(overhead_ours.app, children))
            rates["peer_child"].append(supervised_peer(overhead_peer.run_child, children))
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(timeout=60)
        server.stop()
    median = {name: statistics.median(values) for name, values in rates.items()}
    return [
        row("throughput", median["ours"], median["peer"], "calls/s", more_is_better=True),
        row(
            "throughput_supervised",
            median["ours_child"],
            median["peer_child"],
            "tasks/s",
            more_is_better=True,
            peer_name="Celery task that starts the same child",
        ),
        *(
            row(
                f"latency_p{percent}",
                percentile(waits["ours"], percent),
                percentile(waits["peer"], percent),
                "s",
                more_is_better=False,
            )
            for percent in (50, 99)
        ),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within 60 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    sizes = (2, 500, 60, 12) if options.quick else (5, 1500, 200, 40)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = measure(*sizes, Path(folder))
    print(f"{'metric':<24}{'ours':>12}{'peer':>12}  {'unit':<9}{'ratio':>7}  peer")
    for item in rows:
        print(
            f"{item['metric']:<24}{item['ours']:>12.4g}{item['peer']:>12.4g}  {item['unit']:<9}{item['ratio']:>7.2f}"
            f"  {item['peer_name']}"
        )
    if options.json:
        print(json.dumps({"name": "overhead", "rows": rows}))


if __name__ == "__main__":
    main()
