"""The app that recovery.py measures as the peer: Celery with a visibility time-out of LEASE_SECONDS."""

from __future__ import annotations

import os

from recovery_task import hold as hold_until_released
from stock_celery import stock_app

url = os.environ["REDIS_URL"]
app = stock_app(url)
app.conf.broker_transport_options = {
    **app.conf.broker_transport_options,
    "visibility_timeout": float(os.environ["LEASE_SECONDS"]),
}


@app.task(name="bench.hold_peer")
def hold(name: str, at_most_seconds: float) -> None:
    """Note the start, then last until released."""
    hold_until_released(url, name, at_most_seconds)
