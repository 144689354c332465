"""The app that overhead.py measures as ours: gpuflow with one no-op task."""

from __future__ import annotations

import time

from gpuflow.celery_app import app

__all__ = ["app", "began", "noop"]


@app.task(name="bench.noop")
def noop() -> None:
    """Do nothing."""


@app.task(name="bench.began")
def began() -> float:
    """Return when it began, in Unix seconds."""
    return time.time()
