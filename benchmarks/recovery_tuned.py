"""The second peer of recovery.py: Celery set to look for lost messages every second, instead of every 100 or so."""

from __future__ import annotations

import os

from recovery_task import hold as hold_until_released
from stock_celery import stock_app

app = stock_app(os.environ["REDIS_URL"])
app.main = "bench_tuned"
app.conf.update(
    task_default_queue="bench-tuned",
    broker_transport_options={
        "global_keyprefix": "tuned:",
        "visibility_timeout": float(os.environ["LEASE_SECONDS"]),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    result_backend_transport_options={"global_keyprefix": "tuned:"},
)


@app.task(name="bench.hold_tuned")
def hold(name: str, at_most_seconds: float) -> None:
    """Note the start, then last until released."""
    hold_until_released(os.environ["REDIS_URL"], name, at_most_seconds)
