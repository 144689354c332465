"""The app that overhead.py measures as ours: gpuflow with one no-op task."""

from __future__ import annotations

from gpuflow.celery_app import app

__all__ = ["app", "noop"]


@app.task(name="bench.noop")
def noop() -> None:
    """Do nothing."""
