"""What the buttons of the pages do: the steps of `gpuflow cancel`, `retry`, `resume`, `dead` and `workers`.

Each takes the id of its target and returns a line for people. Blocking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gpuflow import client
from gpuflow.celery_app import GPUFlow
from gpuflow.fleet.orders import Order, drain_worker, order_worker
from gpuflow.fleet.registry import Fleet
from gpuflow.handles import PipelineRun, Task, reachable

Action = Callable[[GPUFlow, str], str]


class ActionRefused(Exception):
    """The target is not in a state for this; the text says in which it is."""


def cancel(app: GPUFlow, record_id: str) -> str:
    """Cancel a task, or all of a pipeline that has not ended. Raises UnknownTask."""
    handle = client.get(record_id, app=app)
    verdict = handle.cancel() if isinstance(handle, Task) else ("cancelled" if handle.cancel() else "final")
    if verdict == "final":
        raise ActionRefused(f"{record_id} had ended before")
    return f"{record_id} is cancelled" if verdict == "cancelled" else f"the worker of {record_id} stops it"


def retry(app: GPUFlow, task_id: str) -> str:
    """Queue an ended task again. Raises UnknownTask."""
    task = _task(app, task_id)
    if not task.retry():
        raise ActionRefused(f"{task_id} is {task.state}; only a task that failed, died or was cancelled is retried")
    return f"{task_id} is queued again"


def resume(app: GPUFlow, pipeline_id: str) -> str:
    """Run what is not done of a pipeline. Raises UnknownTask."""
    handle = client.get(pipeline_id, app=app)
    if not isinstance(handle, PipelineRun):
        raise ActionRefused(f"{pipeline_id} is a task; retry it")
    if handle.resume() == "succeeded":
        raise ActionRefused(f"{pipeline_id} has succeeded; nothing is left to do")
    return f"{pipeline_id} is resumed"


def retry_dead(app: GPUFlow, task_id: str) -> str:
    """Queue a dead letter again. Raises UnknownTask."""
    _require_dead(app, task_id)
    return retry(app, task_id)


def purge_dead(app: GPUFlow, task_id: str) -> str:
    """Forget a dead letter: record, events and history. Raises UnknownTask."""
    _require_dead(app, task_id)
    with reachable():
        if not app.ledger.purge(task_id):
            raise ActionRefused(f"{task_id} is not among the dead letters any more")
    return f"{task_id} is forgotten"


def drain(app: GPUFlow, worker_id: str) -> str:
    """Let a worker finish what it runs, and stop. Raises OrderRefused."""
    with reachable():
        drain_worker(Fleet(app.redis, app.keys), app.control.broadcast, worker_id, None)
    return f"{worker_id} takes nothing new and stops when its tasks have ended"


def _order(app: GPUFlow, worker_id: str, order: Order) -> None:
    with reachable():
        order_worker(Fleet(app.redis, app.keys), app.control.broadcast, worker_id, order, "ordered in the monitor")


def enable(app: GPUFlow, worker_id: str) -> str:
    """Let a worker take work, whatever the autoscaler decides. Raises OrderRefused."""
    _order(app, worker_id, "enabled")
    return f"{worker_id} is enabled by hand"


def disable(app: GPUFlow, worker_id: str) -> str:
    """Let a worker take nothing new. Raises OrderRefused."""
    _order(app, worker_id, "disabled")
    return f"{worker_id} is disabled by hand and takes nothing new"


def release(app: GPUFlow, worker_id: str) -> str:
    """Leave a worker to the autoscaler again. Raises OrderRefused."""
    _order(app, worker_id, "release")
    return f"{worker_id} is left to the autoscaler"


def _task(app: GPUFlow, task_id: str) -> Task:
    handle = client.get(task_id, app=app)
    if not isinstance(handle, Task):
        raise ActionRefused(f"{task_id} is a pipeline; resume it")
    return handle


def _require_dead(app: GPUFlow, task_id: str) -> None:
    state = _task(app, task_id).state
    if str(state) != "DEAD":
        raise ActionRefused(f"{task_id} is {state}, not among the dead letters")


ACTIONS: Final[Mapping[str, Action]] = {
    "cancel": cancel,
    "retry": retry,
    "resume": resume,
    "dead-retry": retry_dead,
    "dead-purge": purge_dead,
    "drain": drain,
    "enable": enable,
    "disable": disable,
    "release": release,
}

__all__ = ["ACTIONS", "ActionRefused"]
