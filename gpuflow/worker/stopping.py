"""How a worker comes to its end: it drains, hands back what does not finish in time, and stops.

    first SIGTERM or SIGINT, `gpuflow workers drain`, an ephemeral worker's job   -> drain: finish, take nothing new
    second signal, the deadline of a drain, `worker_soft_shutdown_timeout`        -> hand back: children save their
                                                                                     state, messages go to the front
    nothing is left                                                               -> Celery's warm shutdown
    SIGQUIT, after `worker_soft_shutdown_timeout` or once more                    -> Celery's cold shutdown at once
    SIGQUIT for the third time                                                    -> the end, whatever runs

A draining worker still serves `gpuflow.control` and calls the URLs of notices, renews its leases and answers inspect.

Signals are only counted where they arrive: on the main thread, between any two of its steps. Celery would stop the pool
there, and wait for ever for a lock that the interrupted step holds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from celery import signals
from celery.apps.worker import REMAP_SIGTERM
from celery.exceptions import WorkerTerminate
from celery.platforms import EX_FAILURE
from celery.worker import state
from kombu.asynchronous import get_event_loop

from gpuflow.logs import get_logger

if TYPE_CHECKING:
    from gpuflow.worker.runtime import Runtime

log = get_logger("gpuflow.stopping")

#: Left between the end of the handing back and the deadline of a drain, in seconds.
MARGIN_SECONDS: Final = 2.0
#: What the third SIGQUIT leaves Celery to end by itself; then the process ends, and says where it stood.
LAST_SECONDS: Final = 3
_LOOK_SECONDS: Final = 0.1


class Stopper(threading.Thread):
    """Brings one worker to its end when it is told to; runs from its start."""

    def __init__(self, runtime: Runtime, soft_shutdown_seconds: float = 0.0) -> None:
        super().__init__(name="gpuflow-stopper", daemon=True)
        self._runtime = runtime
        self._soft_shutdown_seconds = soft_shutdown_seconds
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may interrupt any other step
        self._signals = 0
        self._quits = 0
        self._hand_back_at: float | None = None
        #: When what runs was told to hand itself back (monotonic seconds).
        self.handed_back_at: float | None = None

    @property
    def is_signalled(self) -> bool:
        """Whether the process was told to end, by a signal."""
        return self._signals + self._quits > 0

    def install_signals(self) -> None:
        """Take SIGTERM, SIGINT and SIGQUIT. Call it on the main thread."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_quit if REMAP_SIGTERM == "SIGQUIT" else self._on_signal)
        signal.signal(signal.SIGQUIT, self._on_quit)

    def drain(self, why: str, deadline_seconds: float | None = None) -> None:
        """Take nothing new and stop when all is done; what is not done by the deadline is handed back before it."""
        runtime = self._runtime
        if deadline_seconds is not None:
            settings = runtime.app.settings
            needed = settings.notice_seconds + settings.grace_seconds + MARGIN_SECONDS
            at = time.monotonic() + max(0.0, deadline_seconds - needed)
            self._hand_back_at = at if self._hand_back_at is None else min(self._hand_back_at, at)
        if not runtime.admission.draining:
            log.info("draining", worker=runtime.worker_id, why=why, deadline_seconds=deadline_seconds)
            runtime.admission.draining = True
            if runtime.admission.sessions is not None:
                runtime.admission.sessions.close_all()
            runtime.stop_replicas()
        self._wake.put(None)

    def run(self) -> None:
        """Watch until the worker stops."""
        is_drained = False
        while True:
            self._look_again_after(_LOOK_SECONDS if self._busy_looking() and not is_drained else 1.0)
            if self._quits:
                self._stop_cold()
                return
            if is_drained:
                continue
            if self._signals and not self._runtime.admission.draining:
                self.drain("signal", self._soft_deadline())
            if self._runtime.admission.has_had_its_job():
                self.drain("ephemeral: the job is done")
            if not self._runtime.admission.draining:
                continue
            overdue = self._hand_back_at is not None and time.monotonic() >= self._hand_back_at
            if (self._signals > 1 or overdue) and self.handed_back_at is None:
                self.handed_back_at = time.monotonic()
                log.info("handing_back", worker=self._runtime.worker_id, tasks=sorted(self._runtime.running))
                self._runtime.stop_all("preempted")
            if self._runtime.admission.idle() and not self._runtime.running:
                log.info("drained", worker=self._runtime.worker_id)
                signals.worker_shutting_down.send(sender=self._runtime.worker_id, sig="SIGTERM", how="Warm", exitcode=0)
                state.should_stop = os.EX_OK
                _wake_consumer()
                is_drained = True  # what is left may still be told to end at once

    def _look_again_after(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=seconds)

    def _stop_cold(self) -> None:
        """Stop what runs, let go of its messages, and have Celery end."""
        runtime = self._runtime
        runtime.admission.draining = True
        deadline = time.monotonic() + self._soft_shutdown_seconds
        while state.active_requests and self._quits < 2 and time.monotonic() < deadline:
            self._look_again_after(_LOOK_SECONDS)
        log.info("stopping_at_once", worker=runtime.worker_id, tasks=sorted(runtime.running))
        signals.worker_shutting_down.send(sender=runtime.worker_id, sig="SIGQUIT", how="Cold", exitcode=EX_FAILURE)
        try:
            stop_now(runtime)
        finally:
            state.should_terminate = EX_FAILURE
            _wake_consumer()

    def _busy_looking(self) -> bool:
        return self._runtime.admission.draining or self._runtime.ephemeral

    def _soft_deadline(self) -> float | None:
        if self._soft_shutdown_seconds <= 0:
            return None
        settings = self._runtime.app.settings
        return self._soft_shutdown_seconds + settings.notice_seconds + settings.grace_seconds + MARGIN_SECONDS

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 1:
            _say("finishing what runs, taking nothing new; once more to hand it back")
        else:
            _say("handing back what runs")
        self._wake.put(None)

    def _on_quit(self, number: int, frame: FrameType | None) -> None:
        self._quits += 1
        if self._quits == 3:  # raised in the midst of a clean-up the exception may be lost, or wait for what never ends
            faulthandler.dump_traceback_later(LAST_SECONDS, exit=True, file=sys.__stderr__ or 2)
        _say("stopping what runs")
        self._wake.put(None)
        if self._quits > 2:
            raise WorkerTerminate(EX_FAILURE)


def stop_now(runtime: Runtime) -> None:
    """Stop every child and cancel what runs without one; their messages go back, and nothing that waits begins."""
    runtime.leases.is_stopping = True
    runtime.stop_all("shutdown")
    for request in _active_requests():
        is_over = request.acknowledged or request.id in state.successful_requests
        if not (request.task.acks_late and is_over):
            request.cancel(None, emit_retry=not request.task.acks_late)


def _active_requests() -> list[Any]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has added one
            return list(state.active_requests)


def _wake_consumer() -> None:
    """Have the consumer loop see now that it is to end: it may sleep on its sockets for a second."""
    hub = get_event_loop()
    if hub is not None:
        hub.call_soon(lambda: None)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # who reads it may have gone
        os.write(sys.__stdout__.fileno() if sys.__stdout__ else 1, f"worker: {text}\n".encode())
