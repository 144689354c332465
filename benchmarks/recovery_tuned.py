"""The second peer of recovery.py: Celery set to look for lost messages every second, instead of every 100 or so."""

from __future__ import annotations

import os

from celery import Celery
from recovery_peer import app as stock
from recovery_task import hold as hold_until_released

app = Celery("bench_tuned")
app.conf.update(stock.conf.changes)
app.conf.update(
    task_default_queue="bench-tuned",
    broker_transport_options={
        **stock.conf.broker_transport_options,
        "global_keyprefix": "tuned:",
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    result_backend_transport_options={"global_keyprefix": "tuned:"},
    broker_url=os.environ["REDIS_URL"],
    result_backend=os.environ["REDIS_URL"],
)


@app.task(name="bench.hold_tuned")
def hold(name: str, at_most_seconds: float) -> None:
    """Note the start, then last until released."""
    hold_until_released(os.environ["REDIS_URL"], name, at_most_seconds)
