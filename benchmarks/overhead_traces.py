"""What traces cost: gpuflow with GPUFLOW_TRACES=otlp next to gpuflow without, in one run on one broker.

    python benchmarks/overhead_traces.py [--quick] [--json]

Rows (`ours` is with traces, `peer` without; a ratio of 1 means that they cost nothing):

* throughput             no-op `@app.task` calls per second; they have no spans
* throughput_supervised  supervised echo tasks per second: seven spans each, and two round trips to Redis more
* latency_supervised_*   seconds from submit to result of a supervised echo task on an idle worker
* cpu_*                  CPU seconds of client and worker for each call and each supervised task (children not counted)

A worker and a client of each kind take turns, the other one first in every second round. The spans go to a collector in
a process of its own on this machine, which takes them and reads nothing.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import harness
import psutil
from overhead import supervised_ours, throughput

PEER = "the same without traces"
#: Prints its port; answers each request, and prints how many spans' bytes it took when its input ends.
COLLECTOR = """
import sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
taken = []
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        taken.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
print(sum(taken), flush=True)
"""


def _nothing() -> None:
    """Do nothing."""


class Kind:
    """A client app and its worker, with or without traces, in keys of their own."""

    def __init__(self, name: str, url: str, folder: Path, jobs: str, **env: str) -> None:
        from gpuflow.celery_app import GPUFlow
        from gpuflow.settings import Settings

        variables = {"REDIS_URL": url, "GPUFLOW_KEY_PREFIX": f"{name}:", **env}
        os.environ.update(variables)
        self.app = GPUFlow(name, settings=Settings.load())
        self.has_traces = self.app.traces is not None  # begun now, with this environment
        self.noop = self.app.task(_nothing, name="bench.noop")
        (folder / name).mkdir()
        options = ("--max-jobs", jobs, "--name", name)
        self.worker = harness.start_worker("overhead_ours", url, folder / name, *options, env=variables)

    def cpu_seconds(self) -> float:
        """Return what this process and the worker have used of CPUs, in seconds."""
        worker = psutil.Process(self.worker.pid).cpu_times()
        return time.process_time() + worker.user + worker.system

    def latencies(self, count: int) -> list[float]:
        """Return seconds from submit to result of supervised tasks, one at a time."""
        from gpuflow.client import submit

        found = []
        for _ in range(count):
            started = time.perf_counter()
            submit({"taskType": "echo", "echo": {"output": 1}}, app=self.app).get(timeout=60)
            found.append(time.perf_counter() - started)
        return found


def measure(rounds: int, calls: int, single: int, children: int, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    server, url = harness.start_broker(folder / "broker")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    collector = subprocess.Popen([sys.executable, "-c", COLLECTOR], text=True, **pipes)  # type: ignore[call-overload]
    kinds: dict[str, Kind] = {}
    try:
        endpoint = f"http://127.0.0.1:{int(collector.stdout.readline())}"
        jobs = str(os.cpu_count() or 2)
        kinds["peer"] = Kind("plain", url, folder, jobs, GPUFLOW_TRACES="none")
        traced = {"GPUFLOW_TRACES": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"}
        kinds["ours"] = Kind("traced", url, folder, jobs, **traced)
        assert (kinds["peer"].has_traces, kinds["ours"].has_traces) == (False, True)
        for one in kinds.values():
            harness.ready(one.app)
            throughput(one.noop, 50)
            supervised_ours(one.app, 4)
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for number in range(rounds):
            harness.progress(f"round {number + 1} of {rounds}")
            for name in sorted(kinds, reverse=number % 2 == 1):
                one, used = kinds[name], [kinds[name].cpu_seconds()]
                found["throughput", name].append(throughput(one.noop, calls))
                used.append(one.cpu_seconds())
                found["throughput_supervised", name].append(supervised_ours(one.app, children))
                used.append(one.cpu_seconds())
                found["latency_supervised", name] += one.latencies(single)
                for what, count, (before, after) in zip(
                    ("cpu_call", "cpu_supervised"), (calls, children), itertools.pairwise(used), strict=True
                ):
                    found[what, name].append((after - before) / count)
    finally:
        for one in kinds.values():
            if one.app.traces is not None:
                one.app.traces.close()
        harness.stop([one.worker for one in kinds.values()])
        taken, _ = collector.communicate()
        server.stop()
    harness.progress(f"the collector took {int(taken):,} bytes")
    assert int(taken) > 0, "the collector was sent nothing"
    return rows_of(found)


def rows_of(found: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    """Return the rows: medians of the rounds, percentiles of all waits."""

    def row(metric: str, what: str, unit: str, percent: int = 50) -> dict[str, Any]:
        ours, peer = (harness.percentile(found[what, name], percent) for name in ("ours", "peer"))
        return harness.row(metric, ours, peer, unit, more_is_better=unit.endswith("/s"), peer_name=PEER)

    return [
        row("throughput", "throughput", "calls/s"),
        row("throughput_supervised", "throughput_supervised", "tasks/s"),
        row("latency_supervised_p50", "latency_supervised", "s"),
        row("latency_supervised_p99", "latency_supervised", "s", 99),
        row("cpu_call", "cpu_call", "s"),
        row("cpu_supervised", "cpu_supervised", "s"),
    ]


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    sizes = (3, 200, 10, 20) if given.quick else (15, 300, 20, 40)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = measure(*sizes, Path(folder))
    harness.show("overhead_traces", rows, as_json=given.json)


if __name__ == "__main__":
    main()
