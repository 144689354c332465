"""Maintenance tasks: what beat asks for and what anybody may ask for at any time. Idempotent."""

from __future__ import annotations

from gpuflow.celery_app import app
from gpuflow.routing.families import CONTROL_QUEUE


@app.task(name="gpuflow.maintenance.settle_running", queue=CONTROL_QUEUE, ignore_result=True)
def settle_running() -> None:
    """Settle every running pipeline: mends one whose join was never sent."""
    for record in app.pipelines.recent(1000):
        if not record.state.final:
            app.engine.settle(record.id)
