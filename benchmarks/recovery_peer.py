"""The app that recovery.py measures as the peer: Celery with a visibility time-out of LEASE_SECONDS."""

from __future__ import annotations

import os

from celery import Celery
from recovery_task import hold as hold_until_released

url = os.environ["REDIS_URL"]
app = Celery("bench_peer", broker=url, backend=url)
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    task_default_queue="bench-peer",
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    broker_transport_options={
        "global_keyprefix": "peer:",
        "visibility_timeout": float(os.environ["LEASE_SECONDS"]),
    },
    result_backend_transport_options={"global_keyprefix": "peer:"},
)


@app.task(name="bench.hold_peer")
def hold(name: str, at_most_seconds: float) -> None:
    """Note the start, then last until released."""
    hold_until_released(url, name, at_most_seconds)
