"""How fast work goes on when its worker is killed, and how often long work is run twice, next to plain Celery.

    python benchmarks/recovery.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better); each with a lease of 5 s, and a visibility time-out of 5 s there:

* recovery_time      seconds from kill -9 of the busy worker to the start of its task on another one, median, next to
                     stock Celery, which looks for lost messages about every 100 s. `_p95`: the 95th percentile.
                     With --quick it is waited for 28 s, and that is then its figure.
* recovery_time_tuned  the same next to Celery that looks every second
* duplicate_runs     how often a task that lasts four leases is started again while it runs, next to the tuned Celery.
                     The ratio is (1 + peer) / (1 + ours).
* recovery_time_60   lease and time-out 60 s, next to stock Celery (not with --quick)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import redis
from recovery_task import release_key, starts_key

TASKS = {
    "recovery_ours": "bench.hold",
    "recovery_peer": "bench.hold_peer",
    "recovery_tuned": "bench.hold_tuned",
}
NAMES = {
    "recovery_peer": "Celery 5.7, visibility_timeout {:g} s",
    "recovery_tuned": "Celery 5.7, visibility_timeout {:g} s, sweep 1 s",
}
#: No recovery is waited for longer than this, in seconds.
PATIENCE_SECONDS = 260.0
QUICK_PATIENCE_SECONDS = 28.0


class Side:
    """One of the two: its app module, its workers, and what was measured."""

    def __init__(self, module: str, url: str, folder: Path, lease: float, patience: float) -> None:
        self.module, self.url, self.folder, self.lease, self.patience = module, url, folder, lease, patience
        self.client = redis.Redis.from_url(url)
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.count = 0
        self.times: list[float] = []
        self.duplicates = 0

    def start_worker(self) -> None:
        """Start one more worker."""
        self.count += 1
        name = f"w{self.count}"
        extra = ("--name", name) if self.module == "recovery_ours" else ("-P", "threads", "-n", f"{name}@bench")
        env = {"GPUFLOW_LEASE_SEC": f"{self.lease:g}", "LEASE_SECONDS": f"{self.lease:g}"}
        worker = harness.start_worker(self.module, self.url, self.folder, *extra, env=env)
        self.workers[worker.pid] = worker

    def send(self, name: str, at_most_seconds: float) -> None:
        """Send one task."""
        self.app.tasks[TASKS[self.module]].delay(self._key(name), at_most_seconds)

    def _key(self, name: str) -> str:
        return f"{self.module}:{self.lease:g}:{name}"

    @property
    def app(self) -> Any:
        """The Celery app of this side."""
        return __import__(self.module).app

    def starts(self, name: str) -> list[list[float]]:
        """Return (process id, time) of each start of a task."""
        found: Any = self.client.lrange(starts_key(self._key(name)), 0, -1)
        return [json.loads(entry) for entry in found]

    def wait_for_starts(self, name: str, count: int, seconds: float) -> bool:
        """Wait until a task has been started `count` times."""
        deadline = time.monotonic() + seconds
        while len(self.starts(name)) < count:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def long_task(self) -> None:
        """Run one task of four leases and count how often it is started again."""
        self.send("long", 4 * self.lease)
        self.wait_for_starts("long", 1, 30)
        time.sleep(4 * self.lease + 1)
        self.duplicates = len(self.starts("long")) - 1

    def recoveries(self, trials: int) -> None:
        """Kill the busy worker `trials` times and note when its task starts elsewhere."""
        for number in range(trials):
            name = f"trial{number}"
            self.send(name, PATIENCE_SECONDS + self.lease)
            if not self.wait_for_starts(name, 1, 60):
                raise SystemExit(f"{self.module}: {name} did not start")
            worker = self.workers.pop(int(self.starts(name)[0][0]))
            killed = time.time()
            worker.kill()
            worker.wait()
            again = self.wait_for_starts(name, 2, self.patience)
            self.times.append(self.starts(name)[1][1] - killed if again else self.patience)
            self.client.set(release_key(self._key(name)), 1)
            if not again:
                return
            if number + 1 < trials:
                self.start_worker()
                harness.ready(self.app, 2)


def measure(
    url: str, folder: Path, lease: float, trials: dict[str, int], patience: float, *, duplicates: bool
) -> dict[str, Side]:
    """Measure all sides at the same time, each with two workers of its own."""
    sides = {module: Side(module, url, folder, lease, patience) for module in trials}
    try:
        for side in sides.values():
            side.start_worker()
            side.start_worker()
        for side in sides.values():
            harness.ready(side.app, 2)
        if duplicates:
            together([side.long_task for side in sides.values()])
        together([partial(side.recoveries, trials[module]) for module, side in sides.items()])
    finally:
        for side in sides.values():
            for worker in side.workers.values():
                worker.kill()
            harness.stop(list(side.workers.values()))
            side.client.close()
    return sides


def together(calls: list[Any]) -> None:
    """Run the calls at the same time."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def time_rows(metric: str, ours: Side, peer: Side) -> list[dict[str, Any]]:
    """Return median and 95th percentile of the recoveries."""
    if not (ours.times and peer.times):
        raise SystemExit("a side measured nothing; look at its log")
    name = NAMES[peer.module].format(peer.lease)
    figures = {
        metric: (statistics.median(ours.times), statistics.median(peer.times)),
        f"{metric}_p95": (harness.percentile(ours.times, 95), harness.percentile(peer.times, 95)),
    }
    return [
        harness.row(key, mine, theirs, "s", more_is_better=False, peer_name=name)
        for key, (mine, theirs) in figures.items()
    ]


def run(url: str, folder: Path, *, quick: bool) -> list[dict[str, Any]]:
    """Measure all and return the rows."""
    patience = QUICK_PATIENCE_SECONDS if quick else PATIENCE_SECONDS
    counts = (3, 1, 3) if quick else (20, 3, 20)
    sides = measure(url, folder, 5.0, dict(zip(TASKS, counts, strict=True)), patience, duplicates=True)
    ours, stock, tuned = (sides[module] for module in TASKS)
    rows = [*time_rows("recovery_time", ours, stock), *time_rows("recovery_time_tuned", ours, tuned)]
    rows.append(
        {
            "metric": "duplicate_runs",
            "ours": ours.duplicates,
            "peer": tuned.duplicates,
            "peer_name": NAMES["recovery_tuned"].format(5),
            "unit": "runs",
            "ratio": round((1 + tuned.duplicates) / (1 + ours.duplicates), 3),
        }
    )
    if not quick:
        longer = measure(url, folder, 60.0, {"recovery_ours": 4, "recovery_peer": 1}, patience, duplicates=False)
        rows += time_rows("recovery_time_60", longer["recovery_ours"], longer["recovery_peer"])
    return rows


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        server, url = harness.start_broker(Path(folder) / "broker")
        os.environ.update(REDIS_URL=url, LEASE_SECONDS="5")
        try:
            rows = run(url, Path(folder), quick=given.quick)
        finally:
            server.stop()
    harness.show("recovery", rows, as_json=given.json)


if __name__ == "__main__":
    main()
