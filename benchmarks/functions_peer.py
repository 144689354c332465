"""The app that functions.py measures as the peer: plain Celery, a process of its own for every task."""

from __future__ import annotations

import os

from stock_celery import stock_app

app = stock_app(os.environ["REDIS_URL"])


@app.task(name="bench.cold")
def cold() -> int:
    """Return in which process it ran."""
    return os.getpid()
