"""The app that recovery.py measures as ours: gpuflow with one task that lasts until it is released."""

from __future__ import annotations

import os

from recovery_task import hold as hold_until_released

from gpuflow.celery_app import app

__all__ = ["app", "hold"]


@app.task(name="bench.hold")
def hold(name: str, at_most_seconds: float) -> None:
    """Note the start, then last until released."""
    hold_until_released(os.environ["REDIS_URL"], name, at_most_seconds)
