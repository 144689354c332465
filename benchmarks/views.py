"""What an operator waits for with 10,000 waiting tasks: each view as it is typed, and the cancel of all.

    python benchmarks/views.py [--quick] [--json]

Each row is one command as a process, from its start to its end. The peer is what one types with plain Celery, with as
many messages on the same server: `celery inspect active --timeout 1` for a view (it waits that second for its answers),
`celery purge` for the cancel of all, which leaves no word of what was cancelled. Quick: 1,000 tasks.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import options, progress, ready, row, show, start_broker, start_worker, stop
from stock_celery import stock_app

from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit
from gpuflow.settings import Settings

TASKS, QUICK_TASKS, ROUNDS = 10_000, 1_000, 3
#: What each task asks for and no worker has.
NOWHERE = {"labels": {"rack": "none"}}


def typed(argv: Sequence[str], environment: dict[str, str]) -> float:
    """Run a command, and return its seconds."""
    began = time.perf_counter()
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1):  # 1: doctor has found something
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return seconds


def fill(app: GPUFlow, tasks: int) -> str:
    """Submit tasks that nobody can run; return the id of one."""
    spec = {"taskType": "echo", "echo": {}, "resources": NOWHERE}
    with ThreadPoolExecutor(4) as pool:
        handles = list(pool.map(lambda _: submit(spec, app=app), range(tasks)))
    return str(handles[-1].id)


def fill_peer(app: Any, tasks: int) -> None:
    """Publish as many plain calls that nobody takes."""
    for _ in range(tasks):
        app.send_task("nobody.runs", queue="bench-peer-waiting")


def measured(folder: Path, tasks: int) -> list[dict[str, Any]]:
    """Return the rows."""
    server, url = start_broker(folder / "broker")
    workers: list[subprocess.Popen[bytes]] = []
    try:
        environment = {**os.environ, "REDIS_URL": url, "PEER_URL": url, "PYTHONPATH": str(Path(__file__).parent)}
        app, peer = GPUFlow("views", settings=Settings(redis_url=url)), stock_app(url)
        progress("starting one worker of each")
        workers = [
            start_worker("gpuflow", url, folder, "--name", "w1"),
            start_worker("views_peer", url, folder, "-Q", "bench-peer", env={"PEER_URL": url}),
        ]
        ready(app)
        ready(peer)
        progress(f"submitting {tasks} tasks to each")
        one = fill(app, tasks)
        fill_peer(peer, tasks)
        gpuflow = [sys.executable, "-c", "from gpuflow.cli import main; main()"]
        celery = [sys.executable, "-m", "celery", "-A", "views_peer"]
        views = {
            "status": ["status"],
            "status_queued": ["status", "--state", "QUEUED"],
            "status_json_all": ["status", "--state", "QUEUED", "--limit", str(tasks), "--json"],
            "queues": ["queues"],
            "workers": ["workers"],
            "explain": ["explain", one],
            "dead": ["dead"],
            "usage": ["usage"],
            "doctor": ["doctor"],
        }
        inspect = [*celery, "inspect", "active", "--timeout", "1"]
        progress("typing the views in turn")
        seconds: dict[str, list[float]] = {name: [] for name in [*views, "peer"]}
        for _ in range(ROUNDS):
            for name, words in views.items():
                seconds[name].append(typed([*gpuflow, *words], environment))
            seconds["peer"].append(typed(inspect, environment))
        theirs = statistics.median(seconds.pop("peer"))
        rows = [
            row(name, statistics.median(times), theirs, "s", more_is_better=False, peer_name="celery inspect active")
            for name, times in seconds.items()
        ]
        progress("cancelling all")
        ours = typed([*gpuflow, "cancel", "--state", "QUEUED", "--yes"], environment)
        purge = typed([*celery, "purge", "-f", "-Q", "bench-peer-waiting"], environment)
        rows.append(row("cancel_all", ours, purge, "s", more_is_better=False, peer_name="celery purge"))
        left = int(app.redis.scard(app.keys.unfinished))
        if left:
            raise SystemExit(f"{left} of {tasks} tasks were not cancelled")
        return rows
    finally:
        stop(workers)
        server.stop()


def main() -> None:
    """Measure and print."""
    given = options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), QUICK_TASKS if given.quick else TASKS)
    show("views", rows, as_json=given.json)


if __name__ == "__main__":
    main()
