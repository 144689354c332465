"""Control tasks of pipelines: short, idempotent, served by every worker in slots of their own."""

from __future__ import annotations

from gpuflow.celery_app import app
from gpuflow.pipelines.engine import JOIN_TASK, SETTLE_TASK
from gpuflow.routing.families import CONTROL_QUEUE


@app.task(name=SETTLE_TASK, queue=CONTROL_QUEUE, ignore_result=True)
def settle(pipeline_id: str) -> None:
    """Do all that can be done for a pipeline now."""
    app.engine.settle(pipeline_id)


@app.task(name=JOIN_TASK, queue=CONTROL_QUEUE)
def join(pipeline_id: str, stage: str, epoch: int) -> str:
    """Join one round of a stage: its tasks have ended, so the pipeline goes on. Returns the pipeline's state."""
    return str(app.engine.settle(pipeline_id))
