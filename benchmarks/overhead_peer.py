"""The app that overhead.py measures as the peer: plain Celery with the settings that long GPU tasks need.

Late acknowledgement and a prefetch of one, as everybody sets them for long tasks; JSON; results in the same Redis.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from stock_celery import stock_app

app = stock_app(os.environ["REDIS_URL"])
app.conf.update(task_send_sent_event=True, worker_send_task_events=True)
_limit = threading.BoundedSemaphore(os.cpu_count() or 2)


@app.task(name="bench.noop")
def noop() -> None:
    """Do nothing."""


@app.task(name="bench.began")
def began() -> float:
    """Return when it began, in Unix seconds."""
    return time.time()


@app.task(name="bench.run_child")
def run_child() -> Any:
    """Start the child that a supervised echo task starts, read its events, return its result."""
    with _limit, tempfile.TemporaryDirectory() as folder:
        request = {
            "task_id": "bench",
            "task_type": "echo",
            "spec": {"taskType": "echo", "echo": {"output": 1}},
            "output_dir": folder,
        }
        done = subprocess.run(
            [sys.executable, "-P", "-m", "executors"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
        )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return next(event["value"] for event in events if event.get("event") == "result")
