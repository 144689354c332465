"""The app that functions.py measures as ours: gpuflow with functions in children."""

from __future__ import annotations

import os

from gpuflow.celery_app import app

__all__ = ["app", "cold"]


@app.task(name="bench.cold", child=True)
def cold() -> int:
    """Return in which process it ran."""
    return os.getpid()
