"""Control tasks of pipelines: short, idempotent, served by every worker in slots of their own."""

from __future__ import annotations

from typing import Any

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from gpuflow.celery_app import app
from gpuflow.pipelines.controller import JOIN_TASK, RECONCILE_TASK
from gpuflow.routing.families import CONTROL_QUEUE

#: A broker that is away is asked again after this many seconds.
RETRY_SECONDS = 1


def _reconcile(task: Any, pipeline_id: str) -> str:
    try:
        return str(app.pipeline_controller.reconcile(pipeline_id))
    except (RedisError, OperationalError) as error:
        raise task.retry(exc=error, countdown=RETRY_SECONDS, max_retries=None) from error
    except Exception as error:
        app.pipeline_controller.fail(pipeline_id, error)
        raise


@app.task(bind=True, name=RECONCILE_TASK, queue=CONTROL_QUEUE, ignore_result=True)
def reconcile(self: Any, pipeline_id: str) -> None:
    """Do all that can be done for a pipeline now; end it with the cause if that cannot be found out."""
    _reconcile(self, pipeline_id)


@app.task(bind=True, name=JOIN_TASK, queue=CONTROL_QUEUE)
def join(self: Any, pipeline_id: str, stage: str, epoch: int) -> str:
    """Join one round of a stage: its tasks have ended, so the pipeline goes on. Returns the pipeline's state."""
    return _reconcile(self, pipeline_id)
