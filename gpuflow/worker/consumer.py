"""Celery's consumer, which no message ends: one that cannot be read or run is put aside, with the reason.

Celery acknowledges such a message and forgets it, or lets the error through, which ends the worker, and then the next
one that takes it. Here its task fails, and `gpuflow dead messages` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from celery.exceptions import WorkerShutdown
from celery.worker.consumer import Consumer as CeleryConsumer
from celery.worker.state import maybe_shutdown
from redis.exceptions import AuthenticationError, RedisError

from gpuflow.broker.answers import Meaning, meaning_of
from gpuflow.broker.merged_calls import RECORDED_HEADER
from gpuflow.errors import GPUFlowError, UnknownTask, UnreadableMessage
from gpuflow.ledger.backend import error_record
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.outages import outage
from gpuflow.pipelines.controller import RECONCILE_TASK
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.tokens.broker_users import is_worker_login
from gpuflow.worker.runtime import current

log = get_logger("gpuflow.consumer")

#: A broker that refuses the login is asked again after so many seconds.
LOGIN_SECONDS: Final = 0.5
#: A broker that answers and takes no write is connected to again after so many seconds, and if it goes on, these.
REFUSED_SECONDS: Final = 1.0
LONGEST_REFUSED_SECONDS: Final = 60.0
#: A broker that is away is looked for again after so many seconds, however long it has been away. Kombu's own pauses
#: grow to 30 s, in which the keeper of the leases has found it long since.
AWAY_SECONDS: Final = 1.0
#: Exit code of a worker whose token is refused: somebody has to start it with another one.
TOKEN_REFUSED: Final = 2

#: What the fields of a message raise that are not what Celery takes for granted.
_BAD_MESSAGE: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)


class Consumer(CeleryConsumer):  # type: ignore[misc]
    """The consumer of a gpuflow worker."""

    def ensure_connected(self, conn: Any) -> Any:
        """Connect, when the broker takes the login. Raises WorkerShutdown for a token that it goes on to refuse."""
        runtime = current()
        runtime.connecting = runtime.leases.loop_connects = True
        try:
            while True:
                self._await_login()
                try:
                    with _told_of_refusals(conn):
                        return super().ensure_connected(conn)
                except _LoginRefused:  # it took it a moment ago, or was away
                    self.app.redis.connection_pool.disconnect(inuse_connections=False)
        finally:
            runtime.leases.tick()
            runtime.connecting = runtime.leases.loop_connects = False

    def on_connection_error_after_connected(self, exc: BaseException) -> None:
        """Connect again; to a broker that answers and takes no write (it is full, or a replica) not before it does."""
        super().on_connection_error_after_connected(exc)
        if meaning_of(exc) is Meaning.WAIT:
            log.warning("broker_away", cause=str(exc))
            self._await_writes()

    def _await_writes(self) -> None:
        """Wait until the keeper of the leases can write again, a second at least and a minute at most."""
        runtime = current()
        runtime.connecting = runtime.leases.loop_connects = True
        deadline = time.monotonic() + REFUSED_SECONDS
        latest = time.monotonic() + LONGEST_REFUSED_SECONDS
        try:
            while time.monotonic() < (latest if outage.lasts else deadline):
                maybe_shutdown()
                time.sleep(LOGIN_SECONDS)
        finally:
            runtime.leases.tick()
            runtime.connecting = runtime.leases.loop_connects = False

    def _await_login(self) -> None:
        """Wait, having said so once, while the broker refuses the login.

        A server that was restarted may lack its users for some seconds, until a beat has made them again. The token of
        a worker that is refused for a whole lease has been replaced or removed: what ran here runs elsewhere by then.
        A login that was never taken is wrong. One that was is waited for: a password may be about to come back.
        """
        began: float | None = None
        is_fresh = False
        while True:
            maybe_shutdown()
            try:
                self.app.redis.ping()
                return
            except AuthenticationError:
                if began is None:
                    began = time.monotonic()
                    log.error(
                        "token_refused",
                        worker=current().worker_id,
                        cause="the broker does not take user or password of REDIS_URL; correct them, or use the "
                        "REDIS_URL that `gpuflow workers rotate-token` has shown",
                    )
                never_in = current().presence is None
                if (never_in or is_worker_login(self.app.settings.redis_url or "")) and (
                    time.monotonic() - began > self.app.settings.lease_seconds
                ):
                    raise WorkerShutdown(TOKEN_REFUSED) from None
                time.sleep(LOGIN_SECONDS)
            except RedisError:
                if is_fresh:
                    return  # Celery tells of it, and tries again
                # The connections of a token that was replaced are cut: what a new one is told counts.
                is_fresh = True
                self.app.redis.connection_pool.disconnect(inuse_connections=False)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """Return what takes each message; an error of the message is told apart from one of the line."""
        handler = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            try:
                return handler(message)
            except _BAD_MESSAGE as error:
                return _set_aside(message, error)

        return on_task_received

    def on_decode_error(self, message: Any, exc: BaseException) -> None:
        """Put a message aside whose body cannot be decoded."""
        _set_aside(message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: BaseException) -> None:
        """Put a message aside whose arguments are none."""
        _set_aside(message, exc)

    def on_unknown_task(self, body: Any, message: Any, exc: BaseException) -> None:
        """Let a task fail that no module of this worker registers, as Celery does, and its record with it."""
        super().on_unknown_task(body, message, exc)
        task_id = message.headers.get("id")
        if message.headers.get(RECORDED_HEADER) and isinstance(task_id, str):
            name = str(message.headers.get("task"))
            error = UnknownTask(
                f"worker {current().worker_id} has no task {name}: start it with --include and the module that "
                "registers it, or route the task to workers that have it"
            )
            try:
                fail_of_message(self.app, task_id, error)
            except RedisError as cause:  # the message is gone: it is restored from its record, and comes here again
                log.warning("end_not_told_yet", task=task_id, cause=str(cause))

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """Put a message aside that names no task."""
        _set_aside(message, ValueError("it names no task"))


class _LoginRefused(Exception):
    """The broker is there, and refuses the login."""


@contextmanager
def _told_of_refusals(conn: Any) -> Iterator[None]:
    """Let a connection be tried each AWAY_SECONDS, and raise _LoginRefused, instead of trying that for ever too."""
    ensure = conn.ensure_connection

    def ensure_connection(errback: Callable[[BaseException, float], Any], *args: Any, **kwargs: Any) -> Any:
        def told(error: BaseException, interval: float) -> Any:
            if isinstance(error, AuthenticationError):
                raise _LoginRefused from error
            return errback(error, interval)

        pauses = {"interval_start": AWAY_SECONDS, "interval_step": 0, "interval_max": AWAY_SECONDS}
        return ensure(told, *args, **pauses, **kwargs)

    conn.ensure_connection = ensure_connection
    try:
        yield
    finally:
        del conn.ensure_connection


def _set_aside(message: Any, error: BaseException) -> None:
    headers = message.headers if isinstance(message.headers, dict) else {}
    task_id = headers.get("id")
    why = f"{type(error).__name__}: {error}"[:1000]
    log.warning("message_not_run", task=task_id, exc_info=error)
    current().leases.set_aside(message.delivery_tag, task_id if isinstance(task_id, str) else "", why)
    message.ack()  # there is no lease any more: it is only that kombu forgets the message


def fail_unreadable(app: Any, task_id: str, why: str) -> None:
    """Make the task of a message that cannot be run fail, for gpuflow and for Celery. Raises redis errors."""
    fail_of_message(
        app,
        task_id,
        UnreadableMessage(f"the message of task {task_id} cannot be run: {why}; submit the task again"),
    )


def fail_of_message(app: Any, task_id: str, error: GPUFlowError) -> None:
    """Make a task fail whose message is put aside, for gpuflow and for Celery. Raises redis errors."""
    record = app.ledger.find(task_id)
    if record is not None and not app.ledger.commit(
        task_id, TaskState.FAILED, holder=None, error=error_record(error, retryable=False)
    ):
        return  # it has ended, or it runs by another delivery
    if record is not None and record.is_run:
        app.merger.complete(task_id)
        return
    app.backend.store_result(task_id, error, "FAILURE")
    if record is not None and record.pipeline:
        app.send_task(RECONCILE_TASK, args=(record.pipeline,), queue=CONTROL_QUEUE, ignore_result=True)
