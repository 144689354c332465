"""The Celery pool of a gpuflow worker: threads, each of which supervises a child or runs a light task.

Beyond Celery's threads pool: a task can be terminated, hard and soft time limits hold, the pool grows and shrinks,
control tasks have threads of their own, and a message whose lease was returned is not run.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from billiard.einfo import ExceptionInfo
from billiard.exceptions import SoftTimeLimitExceeded
from celery.app.task import Context
from celery.concurrency.base import apply_target
from celery.concurrency.thread import ApplyResult, TaskPool
from celery.exceptions import InvalidTaskError
from celery.worker import state

from gpuflow.broker.answers import passes
from gpuflow.broker.messages import ETA_HEADER
from gpuflow.functions.calls import FUNCTION_HEADER
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES, SUPERVISED_TASKS
from gpuflow.worker.outcome import StopReason
from gpuflow.worker.runtime import Runtime, find
from gpuflow.worker.slots import CONTROL_SLOTS, MOST_REPLICAS, NOTICE_SLOTS
from gpuflow.worker.stopping import stop_now

log = get_logger("gpuflow.pool")

#: What follows a task and could not be published is tried again after so many seconds.
FOLLOW_UP_SECONDS: Final = 0.5
#: What the names of our own tasks begin with: their specs have limits, and replicas and control tasks none.
_OURS: Final = "gpuflow."
#: The limit of a task whose attempt has not begun is tried again after so many seconds.
_LOOK_AGAIN_SECONDS: Final = 0.2
#: Of a thread: whether the task that it runs is a supervised one.
_running = threading.local()


def publishes_again(error: Exception) -> bool:
    """Say whether a publish that failed is to be tried again; wait a moment before that.

    What follows a supervised task (the next of its chain, its errback) is published when the task has been committed:
    it would be lost, and the message acknowledged. So it is tried as long as the delivery is ours; if it is in vain for
    good, or the process ends, the message is not acknowledged, and its next delivery tries again.
    """
    runtime = find()
    if runtime is None or not getattr(_running, "is_supervised", False):
        return False
    leases, tag = runtime.leases, runtime.leases.here
    if not leases.holds(tag):
        return False
    log.warning("follow_up_not_published", cause=str(error))
    if leases.is_stopping or not passes(error):
        leases.forget(tag)
        return False
    leases.wait(FOLLOW_UP_SECONDS)
    return leases.holds(tag)


def raise_in_thread(ident: int, error: type[BaseException]) -> None:
    """Raise `error` in another thread at its next bytecode (CPython)."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


class Job(ApplyResult):  # type: ignore[misc]
    """One task on the pool: what Celery keeps, and ends by `terminate`."""

    def __init__(self, task_id: str, *, is_supervised: bool = False) -> None:
        self.task_id = task_id
        self.is_supervised = is_supervised
        self.thread_ident: int | None = None
        self.timers: list[threading.Timer] = []
        self.done = False
        #: Whether Celery knows how the task ends: it was revoked, or its time is over.
        self.told = False

    def begin(self, runtime: Runtime | None) -> None:
        """Note that this thread runs the task now."""
        self.thread_ident = threading.get_ident()
        _running.is_supervised = self.is_supervised
        if runtime is not None:
            runtime.begun.discard(self.thread_ident)

    def bind(self, future: Future[Any]) -> None:
        """Attach the future once it is submitted."""
        super().__init__(future)

    def terminate(self, signum: int = signal.SIGTERM) -> None:
        """End the task: its child if it has one (SIGKILL at once), else by an exception in its thread."""
        runtime = find()
        if runtime is not None and runtime.stop(self.task_id, "cancelled", at_once=signum == signal.SIGKILL):
            return
        if self.is_supervised and runtime is not None and self.thread_ident in runtime.begun:
            return  # its attempt is over: nothing interrupts a supervisor that commits and tells the end
        if not self.done and self.thread_ident is not None:
            self.told = True
            raise_in_thread(self.thread_ident, SystemExit)

    def limit(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` after `seconds` unless the task has ended."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def close(self) -> None:
        """Cancel the limits."""
        self.done = True
        for timer in self.timers:
            timer.cancel()


def is_supervised(request: Mapping[str, Any]) -> bool:
    """Say whether a request is of a task that runs in a child."""
    return request.get("task") in SUPERVISED_TASKS or bool(request.get(FUNCTION_HEADER))


def _fail_unbegun(request: Mapping[str, Any], task_id: str) -> None:
    """Make a supervised task fail that gave nothing back and has not come to its START, before its message is gone.

    Celery stumbled over its arguments, and says so in the log alone.
    """
    runtime = find()
    if runtime is None or not is_supervised(request):
        return
    record = runtime.app.ledger.find(task_id)
    if record is not None and record.state is TaskState.QUEUED:
        error = InvalidTaskError("Celery could not call the task as its message says; the worker's log has the cause")
        runtime.app.backend.mark_as_failure(task_id, error, request=Context(request))


class SupervisorPool(TaskPool):  # type: ignore[misc]
    """Threads that supervise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._control = ThreadPoolExecutor(max_workers=CONTROL_SLOTS, thread_name_prefix="gpuflow-control")
        self._notices = ThreadPoolExecutor(max_workers=NOTICE_SLOTS, thread_name_prefix="gpuflow-notice")
        #: Replicas wait as long as a model is served, and take no thread of those that answer.
        self._replicas = ThreadPoolExecutor(max_workers=MOST_REPLICAS, thread_name_prefix="gpuflow-replica")
        self._jobs: dict[str, Job] = {}

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        timeout: float | None = None,
        soft_timeout: float | None = None,
        timeout_callback: Callable[..., Any] | None = None,
        error_callback: Callable[..., Any] | None = None,
        **_: Any,
    ) -> Job:
        """Run one task on a thread, within its limits."""
        args = args or ()
        request = args[2] if len(args) > 2 and isinstance(args[2], dict) else {}
        request["eta"] = request.get(ETA_HEADER) or request.get("eta")
        tag = str((request.get("properties") or {}).get("delivery_tag") or "")
        job = Job(str(args[1]) if len(args) > 1 else "", is_supervised=is_supervised(request))
        runtime = find()
        leases = runtime.leases if tag and runtime is not None else None
        delivery = leases.delivery(tag) if leases is not None else None
        soft, hard = self._limits(request, soft_timeout, timeout)

        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return target(*args, **kwargs)
            except Exception:  # noqa: BLE001  (of Celery's own steps around the task: it is the task's failure)
                return ExceptionInfo()

        def ended(returned: Any) -> None:
            if not isinstance(returned, ExceptionInfo):
                if returned[:2] == (0, None):
                    _fail_unbegun(request, job.task_id)
                if callback is not None:
                    callback(returned)
            elif error_callback is not None and not job.told:
                # sys.exit() and the like: in a process of its own the worker would be lost, here it goes on.
                error_callback(returned)

        def run() -> Any:
            # The message may have come here again since, and another job runs it; a worker that stops begins nothing.
            if leases is not None and (
                leases.is_stopping or delivery is None or not leases.start(tag, delivery=delivery)
            ):
                log.info("returned_message_not_run", task=job.task_id)
                return None
            try:
                job.begin(runtime)
                if leases is not None:
                    leases.work_on(tag)
                if soft is not None:
                    job.limit(soft, lambda: self._soft(job, soft, timeout_callback))
                if hard is not None:
                    job.limit(hard, lambda: self._hard(job, hard, timeout_callback))
                return apply_target(called, args, kwargs or {}, ended, accept_callback)
            except Exception:
                log.exception("end_not_told", task=job.task_id)
                raise
            finally:
                _running.is_supervised = False
                if leases is not None:
                    leases.work_on("")
                    leases.over(tag)
                job.close()
                self._jobs.pop(job.task_id, None)

        queue = str((request.get("delivery_info") or {}).get("routing_key"))
        lane = {CONTROL_QUEUE: self._control, **dict.fromkeys(NOTICE_QUEUES, self._notices)}.get(queue) or self.executor
        if runtime is not None and runtime.admission.is_replica(tag):
            lane = self._replicas
        self._jobs[job.task_id] = job
        job.bind(lane.submit(run))
        return job

    def _limits(
        self, request: Mapping[str, Any], soft: float | None, hard: float | None
    ) -> tuple[float | None, float | None]:
        """Return the limits of a task: its own, else, for a team's, those of the worker (--time-limit and its like)."""
        if str(request.get("task")).startswith(_OURS):
            return soft, hard
        return soft or self.options.get("soft_timeout") or None, hard or self.options.get("timeout") or None

    def _soft(self, job: Job, seconds: float, timeout_callback: Callable[..., Any] | None) -> None:
        if job.done:
            return
        if timeout_callback is not None:
            timeout_callback(True, seconds)
        if job.is_supervised:
            self._stop_attempt(job, "soft_timeout")
        elif job.thread_ident is not None:
            raise_in_thread(job.thread_ident, SoftTimeLimitExceeded)

    def _stop_attempt(self, job: Job, reason: StopReason, *, at_once: bool = False) -> None:
        """Stop the attempt of a supervised task; one that has not begun is waited for, one that is over is left alone.

        Its supervisor commits and tells its end then, which nothing may interrupt.
        """
        runtime = find()
        if runtime is None or job.done or runtime.stop(job.task_id, reason, at_once=at_once):
            return
        if job.thread_ident not in runtime.begun:
            job.limit(_LOOK_AGAIN_SECONDS, lambda: self._stop_attempt(job, reason, at_once=at_once))

    def _hard(self, job: Job, seconds: float, timeout_callback: Callable[..., Any] | None) -> None:
        if job.done:
            return
        if job.is_supervised:
            self._stop_attempt(job, "timeout", at_once=True)
            return
        job.told = True
        if timeout_callback is not None:
            timeout_callback(False, seconds)
        if job.thread_ident is not None:
            raise_in_thread(job.thread_ident, SystemExit)

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Do nothing: `pid` is the worker itself; Celery then calls the job's own `terminate`."""

    def on_stop(self) -> None:
        """Wait for the tasks, whose leases are renewed until then; on a cold stop their messages go back."""
        runtime = find()
        if runtime is not None:
            runtime.leases.consumer_has_ended()
        if runtime is not None and state.should_terminate is not None and state.should_terminate is not False:
            stop_now(runtime)
        self.executor.shutdown(cancel_futures=True)
        self._control.shutdown(cancel_futures=True)
        self._notices.shutdown(cancel_futures=True)
        self._replicas.shutdown(cancel_futures=True)
        if runtime is not None:
            runtime.close()
        super().on_stop()

    def on_terminate(self) -> None:
        """Stop every child at once."""
        runtime = find()
        if runtime is not None:
            runtime.stop_all("shutdown")
        self.on_stop()

    def grow(self, n: int = 1) -> None:
        """Add threads."""
        self._resize(self.limit + n)

    def shrink(self, n: int = 1) -> None:
        """Take threads away; those that are at work finish first."""
        self._resize(max(1, self.limit - n))

    def _resize(self, limit: int) -> None:
        self.limit = limit
        self.executor._max_workers = limit
        runtime = find()
        if runtime is not None:
            runtime.admission.limits.threads = limit

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        info.update({"processes": [], "timeouts": (self.options.get("soft_timeout"), self.options.get("timeout"))})
        return info
