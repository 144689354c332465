"""What the benchmarks share: a broker of our own, Celery workers as processes, rows and how they are printed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def start_broker(folder: Path) -> tuple[Any, str]:
    """Start a broker of our own with an append-only file."""
    from gpuflow.broker.embedded import EmbeddedServer

    server = EmbeddedServer(folder, fixed_password="benchmark-of-gpuflow")  # a port, for stock Celery and proxies
    return server, server.start()


def start_worker(
    module: str, url: str, folder: Path, *extra: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start one Celery worker process."""
    environment = {
        **os.environ,
        "REDIS_URL": url,
        "RESULTS_DIR": str(folder / "results"),
        "GPUFLOW_LOCK_DIR": str(folder / "locks"),
        "LOG_LEVEL": "WARNING",  # of our own lines, which -l leaves alone: all are as quiet
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "GPUFLOW_STATE_DIR": str(folder / "state"),
        # Models that are made for the run, or that MODEL names.
        "GPUFLOW_READ_ROOTS": ",".join(filter(None, (str(folder), os.environ.get("MODEL", "")))),
        **(env or {}),
    }
    with (folder / f"{module}.log").open("ab") as log:
        command = [sys.executable, "-m", "celery", "-A", module, "worker", "-c", "16", "-l", "WARNING", *extra]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)


def stop(workers: list[subprocess.Popen[bytes]]) -> None:
    """Stop worker processes, and wait for their end."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    for worker in workers:
        try:
            worker.wait(timeout=30)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait(timeout=30)


def ready(app: Any, count: int = 1, deadline_seconds: float = 60) -> None:
    """Wait until `count` workers of the app answer."""
    end = time.monotonic() + deadline_seconds
    while len(app.control.ping(timeout=0.5, limit=count) or ()) < count:
        if time.monotonic() > end:
            raise SystemExit(f"{count} workers of {app.main} did not answer within {deadline_seconds:g} s")


_STARTED = time.monotonic()


def progress(text: str) -> None:
    """Say on standard error what is done now, with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of values."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(sorted(values), n=100, method="inclusive")[percent - 1]


def row(metric: str, ours: float, peer: float, unit: str, *, more_is_better: bool, peer_name: str) -> dict[str, Any]:
    """Return one row of the table; a ratio above 1 means that ours is better."""
    ratio = ours / peer if more_is_better else peer / ours
    return {
        "metric": metric,
        "ours": round(ours, 5),
        "peer": round(peer, 5),
        "peer_name": peer_name,
        "unit": unit,
        "ratio": round(ratio, 3),
    }


def options(description: str, flags: Mapping[str, str] | None = None) -> argparse.Namespace:
    """Read the options that every benchmark has, and flags of its own (name: help).

    From now on SIGTERM ends it as an exception does, cleanly.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within 60 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    for name, text in (flags or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    return parser.parse_args()


def show(name: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the table, and the JSON object as the last line."""
    width = max(24, *(len(item["metric"]) + 2 for item in rows))
    print(f"{'metric':<{width}}{'ours':>12}{'peer':>12}  {'unit':<9}{'ratio':>7}  peer")
    for item in rows:
        print(
            f"{item['metric']:<{width}}{item['ours']:>12.4g}{item['peer']:>12.4g}  {item['unit']:<9}"
            f"{item['ratio']:>7.2f}  {item['peer_name']}"
        )
    if as_json:
        print(json.dumps({"name": name, "rows": rows}))
