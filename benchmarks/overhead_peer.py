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
from typing import Any

from celery import Celery

url = os.environ["REDIS_URL"]
app = Celery("bench_peer", broker=url, backend=url)
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    task_default_queue="bench-peer",
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    task_send_sent_event=True,
    worker_send_task_events=True,
    broker_transport_options={"global_keyprefix": "peer:"},
    result_backend_transport_options={"global_keyprefix": "peer:"},
)
_limit = threading.BoundedSemaphore(os.cpu_count() or 2)


@app.task(name="bench.noop")
def noop() -> None:
    """Do nothing."""


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
