"""Celery's request, told apart: a task that is cancelled by a user, and one that is given back by a stopping worker."""

from __future__ import annotations

import copy
from typing import Any, Final

from billiard.einfo import ExceptionWithTraceback
from celery.worker.request import Request
from redis.exceptions import RedisError

from gpuflow.broker.merged_calls import RECORDED_HEADER
from gpuflow.functions.calls import FUNCTION_HEADER, is_templated
from gpuflow.logs import get_logger
from gpuflow.routing.families import SUPERVISED_TASKS
from gpuflow.secrets import public_spec
from gpuflow.worker.runtime import find

log = get_logger("gpuflow.request")

#: What stands for a MemoryError where Celery looks for its own class, with its name in events and in what is stored.
_MemoryError: Final = type("MemoryError", (Exception,), {"__module__": "builtins"})


class GPURequest(Request):  # type: ignore[misc]
    """A request whose `cancel` (a cold stop of the worker) puts the message back to the front of its queue.

    `inspect active` and Flower see the spec of a supervised task without its secrets.
    """

    _already_cancelled: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_templated(self._request_dict):
            pass  # it runs in a child whatever its task says
        elif getattr(self.task, "in_child", False):  # its sender may not have known that, and written no record
            self._request_dict.update({RECORDED_HEADER: 1, FUNCTION_HEADER: 1})
        elif getattr(self.task, "child", None) is False:  # nor this, and written one: it runs by that, in a thread
            self._request_dict.pop(FUNCTION_HEADER, None)
        if self._request_dict.get(RECORDED_HEADER):
            # Acknowledged before, it would have no lease, and never begin; sent again after its end, it would for ever.
            self.task.acks_late = self.task.acks_on_failure_or_timeout = True
            self.task.acks_on_failure = self.task.acks_on_timeout = True

    def info(self, safe: bool = False) -> dict[str, Any]:
        """Return what Celery tells about the request."""
        told: dict[str, Any] = super().info(safe=safe)
        if not safe and self.name in SUPERVISED_TASKS:
            told.update(args=public_spec(told["args"]), kwargs=public_spec(told["kwargs"]))
        return told

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Tell a failure. A MemoryError is that of the call: Celery ends the worker for it, which has other calls."""
        error = exc_info.exception
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        if isinstance(error, MemoryError):
            exc_info = copy.copy(exc_info)
            exc_info.exception = _MemoryError(*error.args)
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

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
        is_ours = self.name in SUPERVISED_TASKS or bool(self._request_dict.get(FUNCTION_HEADER))
        if is_ours and job is not None and job.thread_ident is not None:
            return  # it begins nothing more, or is at its end: it lets go of its message itself
        try:
            runtime.leases.settle(self.message.delivery_tag, "front")
        except RedisError as error:
            log.warning("message_left_to_the_sweep", task=self.id, cause=str(error))
        self._already_cancelled = True
        if job is not None:
            job.terminate()
