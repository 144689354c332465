"""Celery's request, told apart: a task that is cancelled by a user, and one that is given back by a stopping worker."""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request
from redis.exceptions import RedisError

from gpuflow.logs import get_logger
from gpuflow.routing.families import SUPERVISED_TASKS
from gpuflow.secrets import public_spec
from gpuflow.worker.runtime import find

log = get_logger("gpuflow.request")


class GPURequest(Request):  # type: ignore[misc]
    """A request whose `cancel` (a cold stop of the worker) puts the message back to the front of its queue.

    `inspect active` and Flower see the spec of a supervised task without its secrets.
    """

    _already_cancelled: bool = False

    def info(self, safe: bool = False) -> dict[str, Any]:
        """Return what Celery tells about the request."""
        told: dict[str, Any] = super().info(safe=safe)
        if not safe and self.name in SUPERVISED_TASKS:
            told.update(args=public_spec(told["args"]), kwargs=public_spec(told["kwargs"]))
        return told

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Stop the child; the supervisor then returns the message. A task without a child is returned at once."""
        if self._already_cancelled:
            return
        runtime = find()
        if runtime is None:
            super().cancel(pool, signal=signal, emit_retry=emit_retry)
            return
        if runtime.stop(self.id, "shutdown"):
            return
        job = self._apply_result() if self._apply_result is not None else None
        if self.name in SUPERVISED_TASKS and job is not None and job.thread_ident is not None:
            return  # it begins nothing more, or is at its end: it lets go of its message itself
        try:
            runtime.leases.settle(self.message.delivery_tag, "front")
        except RedisError as error:
            log.warning("message_left_to_the_sweep", task=self.id, cause=str(error))
        self._already_cancelled = True
        if job is not None:
            job.terminate()
