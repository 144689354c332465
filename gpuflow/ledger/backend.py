"""The result backend: Celery's Redis backend behind the fence of the ledger.

For a task with a record, nothing is stored, counted in a chord or passed to a link before the record says so: a
failure, time-out or revocation is first committed by compare-and-set, and a refused one leaves no trace. A task
without a record (a team's own Celery task) behaves as in stock Celery.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final

from celery import states
from celery.backends.redis import CHORD_CLEANUP_LUA, RedisBackend
from celery.exceptions import TaskRevokedError
from celery.utils.serialization import UnpickleableExceptionWrapper, ensure_serializable
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from gpuflow.broker.answers import passes
from gpuflow.broker.installed import installed
from gpuflow.broker.merged_calls import FETCH_HEADER, RECORDED_HEADER, RUN_HEADER
from gpuflow.broker.wire import needs_care, wrapped
from gpuflow.errors import TaskFailed
from gpuflow.functions.calls import EXCEPTION, FUNCTION_HEADER, is_of_function
from gpuflow.ledger.joining import joining, joining_here
from gpuflow.ledger.ledger import Holder, Ledger
from gpuflow.ledger.result_consumer import PatientResultConsumer
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.routing.families import CALL_BACK_QUEUE, MAX_NOTICES, NOTICE_QUEUE, SUPERVISED_TASKS
from gpuflow.secrets import known, public_spec

log = get_logger("gpuflow.backend")

#: How often the claim on a complete chord is looked at, in seconds.
CLAIM_POLL_SECONDS: Final = 0.2
#: For how long it is known that the body of a chord was sent, as Celery has it, in seconds.
SENT_SECONDS: Final = 300

#: A broker that is away is told of the end of a task again after this many seconds.
TAIL_PAUSE_SECONDS: Final = 1.0
#: The control task that calls one URL of a task's `notify`.
NOTIFY_TASK: Final = "gpuflow.maintenance.notify"
#: The same for an entry with a field that the task above did not read at first. A worker of that version, which would
#: send something else and take it for delivered, does not know this one, nor its queue.
CALL_BACK_TASK: Final = "gpuflow.maintenance.call_back"
#: Fields of an entry of `notify` that every version reads.
_PLAIN_NOTICE: Final = frozenset({"on", "url", "headers"})
_NOTICES: Final = uuid.UUID("0d0f7d4c-7a55-5f0e-8a37-3f1c1a7f5b21")


class Attempts:
    """Which attempt of which task this process runs; the supervisor writes, the backend reads."""

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}
        self._lock = threading.Lock()

    def begin(self, task_id: str, holder: Holder) -> None:
        """Note that this process runs (or replays the end of) an attempt."""
        with self._lock:
            self._holders[task_id] = holder

    def end(self, task_id: str) -> None:
        """Forget the attempt."""
        with self._lock:
            self._holders.pop(task_id, None)

    def of(self, task_id: str) -> Holder | None:
        """Return the attempt that this process runs, if any."""
        with self._lock:
            return self._holders.get(task_id)


def notice_task(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and the queue of the control task that calls the URL of an entry of `notify`."""
    given = {name for name, value in entry.items() if value is not None}
    return (NOTIFY_TASK, NOTICE_QUEUE) if given <= _PLAIN_NOTICE else (CALL_BACK_TASK, CALL_BACK_QUEUE)


def error_record(error: BaseException, *, error_type: str | None = None, retryable: bool = False) -> dict[str, Any]:
    """Return the record of an error: `type`, `message`, `retryable`, and what a TaskFailed brings with it."""
    details = getattr(error, "details", None)
    if details:
        return dict(details)
    return {"type": error_type or type(error).__name__, "message": known.text(str(error)), "retryable": retryable}


def _until_told(request: Any, tail: Callable[[], Any]) -> Any:
    """Run the tail of an end: the stored result, the chord's count. It is idempotent.

    While the broker takes none of it, it is tried again as long as the message is ours: Celery would take the error for
    one of the task and acknowledge a message whose chord part was never counted. Without a lease the error is raised.
    The message is that on which this thread works: an end is told for others, too (the rest of a chain).
    """
    table = installed()
    if threading.current_thread() is threading.main_thread():
        return tail()  # of a client, or of the consumer loop, which must not wait here
    while True:
        try:
            return tail()
        except (RedisError, OperationalError, OSError, RuntimeError) as error:
            tag = table and (table.here or (getattr(request, "properties", None) or {}).get("delivery_tag"))
            if table is None or not tag or not table.holds(tag):
                raise
            if table.is_stopping or (isinstance(error, RedisError) and not passes(error)):
                table.forget(tag)  # it is not acknowledged, and comes again when its lease has run out
                raise
            log.warning("end_not_told_yet", task=request.id, cause=str(error).strip())
            table.wait(TAIL_PAUSE_SECONDS)


def _notices(request: Any, state: TaskState) -> list[Mapping[str, Any]]:
    """Return the entries of `notify` that are to be called for this end of a supervised task, the first few of them."""
    if getattr(request, "task", None) not in SUPERVISED_TASKS:
        return []
    args, kwargs = getattr(request, "args", None), getattr(request, "kwargs", None)
    spec = kwargs.get("spec") if isinstance(kwargs, Mapping) else None
    if spec is None and isinstance(args, list | tuple) and args:
        spec = args[0]
    if not isinstance(spec, Mapping):
        return []
    named = [entry for entry in spec.get("notify") or () if {str(state).lower(), "finished"} & set(entry["on"])]
    return named[:MAX_NOTICES]


class LedgerBackend(RedisBackend):  # type: ignore[misc]
    """Celery results of the gpuflow app."""

    ResultConsumer = PatientResultConsumer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attempts: Attempts = self.app.attempts
        self._quiet = threading.local()
        self._recount = threading.local()

    @property
    def client(self) -> Any:
        """The client of Celery's results; while a chord is joined, one whose commands are steps of that."""
        join = joining_here()
        return self._plain_client if join is None else join.client(self._plain_client)

    @cached_property
    def _plain_client(self) -> Any:
        return self._create_client(**self.connparams)

    @cached_property
    def _chord_cleanup_script(self) -> Callable[..., Any]:
        """Celery's last step of a join, which it takes when the body is sent."""
        script = self._plain_client.register_script(CHORD_CLEANUP_LUA)

        def clean(**options: Any) -> Any:
            join = joining_here()
            if join is not None and join.cause is None:
                join.is_sent = True
            return script(**options)

        return clean

    @property
    def ledger(self) -> Ledger:
        """The ledger of the app."""
        ledger: Ledger = self.app.ledger
        return ledger

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do nothing: who waits for a result subscribes then, so a submit opens no second connection."""

    @contextmanager
    def nobody_waits(self) -> Iterator[None]:
        """Subscribe to no result of what is sent in this block, as a group does for each of its tasks.

        Such a subscription would end when its result object is collected, in whatever thread that happens, and that
        thread would then wait for a broker that is away.
        """
        self._quiet.on = True
        try:
            yield
        finally:
            self._quiet.on = False

    def add_pending_result(self, result: Any, weak: bool = False, start_drainer: bool = True) -> Any:
        """Watch for a result, unless nobody waits for it."""
        if getattr(self._quiet, "on", False):
            return result
        return super().add_pending_result(result, weak=weak, start_drainer=start_drainer)

    def on_result_fulfilled(self, result: Any) -> None:
        """Unsubscribe, if anybody had subscribed: a result that nobody waited for costs no connection."""
        if self.result_consumer._get_key_for_task(result.id) in self.result_consumer.subscribed_to:
            super().on_result_fulfilled(result)

    def mark_as_failure(
        self,
        task_id: str,
        exc: BaseException,
        traceback: Any = None,
        request: Any = None,
        store_result: bool = True,
        call_errbacks: bool = True,
        state: str = "FAILURE",
    ) -> Any:
        """Commit the failure to the record first; a superseded attempt leaves without store, chord part or errback."""
        if _until_told(request, lambda: self._commit_is_refused(task_id, request, TaskState.FAILED, exc)):
            return None
        tail = super().mark_as_failure
        answer = _until_told(
            request,
            lambda: tail(
                task_id,
                exc,
                traceback=traceback,
                request=request,
                store_result=store_result,
                call_errbacks=call_errbacks,
                state=state,
            ),
        )
        self._complete_calls(task_id, request)
        return answer

    def mark_as_revoked(
        self,
        task_id: str,
        reason: str = "",
        request: Any = None,
        store_result: bool = True,
        state: str = "REVOKED",
    ) -> Any:
        """Commit the cancellation to the record first, as `mark_as_failure` does."""
        revoked = RuntimeError(reason or "revoked")
        if _until_told(request, lambda: self._commit_is_refused(task_id, request, TaskState.CANCELLED, revoked)):
            if getattr(request, FETCH_HEADER, None):  # its call has ended before: that is what Celery is told
                _until_told(request, lambda: self._tell_end(task_id, request))
            return None
        tail = super().mark_as_revoked
        answer = _until_told(
            request,
            lambda: tail(task_id, reason=reason, request=request, store_result=store_result, state=state),
        )
        self._complete_calls(task_id, request)
        return answer

    def mark_as_retry(self, task_id: str, exc: Any, traceback: Any = None, request: Any = None, **kwargs: Any) -> Any:
        """Store that a task is called again; of a function in a child its supervisor has told it."""
        if getattr(request, FUNCTION_HEADER, None):
            return None
        return super().mark_as_retry(task_id, exc, traceback=traceback, request=request, **kwargs)

    def revoked_entry(self, task_id: str, reason: str, request: Any) -> str | None:
        """Return Celery's entry of a task that was cancelled before it ran, for `Ledger.tell_cancelled`.

        None where more than that entry has to be written or sent, which is for `mark_as_revoked`: its chord is counted,
        its end is notified, it belongs to merged calls, or its message cannot be read.
        """
        if request is None or request.task not in SUPERVISED_TASKS or request.ignore_result:
            return None
        if request.chord or getattr(request, RUN_HEADER, None) or getattr(request, FETCH_HEADER, None):
            return None
        if _notices(request, TaskState.CANCELLED):
            return None
        error = self.encode_result(TaskRevokedError(reason), states.REVOKED)
        entry = self._get_result_meta(result=error, state=states.REVOKED, traceback=None, request=request)
        entry["task_id"] = task_id
        text: str = self.encode(entry)
        return text

    def _tell_end(self, task_id: str, request: Any) -> None:
        """Store the end of a merged call, by its record, and count its chord."""
        record = self.ledger.find(task_id)
        if record is None or not record.state.final:
            return
        if record.state is TaskState.SUCCEEDED:
            result = record.result if record.spec else (record.result or {}).get("value")
            super().mark_as_done(task_id, result, request)
        else:
            error = TaskFailed(str((record.error or {}).get("message") or record.state), dict(record.error or {}))
            super().mark_as_failure(task_id, error, request=request)

    def get_task_meta(self, task_id: str, cache: bool = True) -> Any:
        """Return Celery's entry of a task; one that was merged into a run goes on as that does."""
        entry = super().get_task_meta(task_id, cache=cache)
        if entry.get("status") != states.PENDING:
            return entry
        state, run = self.app.redis.hmget(self.app.keys.task(task_id), "state", "run")
        if state != TaskState.MERGED or not run:
            return entry
        of_run = super().get_task_meta(run, cache=False)
        goes_on = of_run.get("status") in (states.STARTED, "PROGRESS")
        return {**of_run, "task_id": task_id} if goes_on else entry

    def _complete_calls(self, task_id: str, request: Any) -> None:
        """Give the callers of a run of merged calls their ends; it is acknowledged after that."""
        if getattr(request, RUN_HEADER, None):
            _until_told(request, lambda: self.app.merger.complete(task_id))

    def on_chord_part_return(self, request: Any, state: str, result: Any, propagate: Any = None, **kwargs: Any) -> None:
        """Count the part; as long as all parts are counted and the body is not sent, see that it is.

        Who counts the last part claims the chord for some seconds. It may die before the body is sent, and then the
        redelivery of its task finds the chord complete and claimed: it must not be acknowledged before the claim has
        ended, one way or the other. While the broker takes nothing, all of it is tried again (`joining`).
        """
        count = super().on_chord_part_return
        is_sent = False

        def once() -> None:
            nonlocal is_sent
            if is_sent:
                return self._close_chord(request.group)
            with joining() as join:
                try:
                    count(request, state, result, propagate=propagate, **kwargs)
                    while request.group and self._is_unsent(request.group):
                        time.sleep(CLAIM_POLL_SECONDS)
                        count(request, state, result, propagate=propagate, **kwargs)
                finally:
                    is_sent = join.is_sent

        _until_told(request, once)

    def _is_unsent(self, group_id: str) -> bool:
        """Whether all parts of a chord are counted, and nobody has sent its body."""
        parts, claim, size, more = (self.get_key_for_group(group_id, suffix) for suffix in (".j", ".c", ".s", ".t"))
        with self.client.pipeline(transaction=False) as pipe:
            pipe.mget([claim, size, more])
            (pipe.zcard if self._chord_zset else pipe.llen)(parts)
            (claim, size, more), counted = pipe.execute()
        return size is not None and claim not in (b"done", "done") and counted == int(size) + int(more or 0)

    def _close_chord(self, group_id: str) -> None:
        """Note that the body of a chord is sent, where the broker did not take that from Celery."""
        with self._plain_client.pipeline() as pipe:
            pipe.set(self.get_key_for_group(group_id, ".c"), "done", ex=SENT_SECONDS)
            pipe.delete(*(self.get_key_for_group(group_id, suffix) for suffix in (".j", ".t", ".s", ".d")))
            pipe.execute()

    def _fail_chain(self, *args: Any, **kwargs: Any) -> None:
        """Let what follows in a chain fail. It may be told for the second time, as an earlier one was cut short.

        Celery takes a part that has failed for one that is counted; its count may be what was cut.
        """
        self._recount.on = True
        try:
            super()._fail_chain(*args, **kwargs)
        finally:
            self._recount.on = False

    def get_state(self, task_id: str) -> str:
        """Return Celery's state of a task; to `_fail_chain`, that each is still to be counted."""
        return states.PENDING if getattr(self._recount, "on", False) else str(super().get_state(task_id))

    def _get_result_meta(
        self, result: Any, state: str, traceback: Any, request: Any, format_date: bool = True, encode: bool = False
    ) -> dict[str, Any]:
        """Return Celery's entry, in which the spec of a supervised task stands without its secrets."""
        entry: dict[str, Any] = super()._get_result_meta(result, state, traceback, request, format_date, encode)
        if entry.get("name") in SUPERVISED_TASKS and not encode:
            entry.update(args=public_spec(entry.get("args")), kwargs=public_spec(entry.get("kwargs")))
        return entry

    def encode(self, data: Any) -> Any:
        """Return Celery's entry as text, so that the user's data in it comes out of `get()` as it went in."""
        text = super().encode(data)
        return super().encode(wrapped(data)) if isinstance(text, str) and needs_care(text) else text

    def prepare_exception(self, exc: Any, serializer: str | None = None) -> Any:
        """Return an exception as it is stored: by its own name, also where a class of it is in no module here."""
        if not isinstance(exc, UnpickleableExceptionWrapper) or (serializer or self.serializer) == "pickle":
            return super().prepare_exception(exc, serializer=serializer)
        message = ensure_serializable(exc.exc_args, self.encode)
        return {"exc_type": exc.exc_cls_name, "exc_message": message, "exc_module": exc.exc_module}

    def meta(self, state: str, result: Any, request: Any) -> str:
        """Return Celery's result entry of a task that runs, as the ledger writes it."""
        entry = self._get_result_meta(result=result, state=state, traceback=None, request=request)
        entry["task_id"] = request.id
        text: str = self.encode(entry)
        return text

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        """Store a result. Before a failure, Celery looks for a success of another attempt, which stays."""
        is_committed = getattr(request, "task", None) in SUPERVISED_TASKS or getattr(request, FUNCTION_HEADER, None)
        if state != states.SUCCESS or not is_committed:
            return super()._store_result(task_id, result, state, traceback=traceback, request=request, **kwargs)
        entry = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        entry["task_id"] = task_id
        self._set_with_state(self.get_key_for_task(task_id), self.encode(entry), state)
        return result

    def mark_as_done(self, task_id: str, result: Any, request: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Store a success, which the supervisor has committed."""
        tail = super().mark_as_done
        answer = _until_told(request, lambda: tail(task_id, result, request, *args, **kwargs))
        if getattr(request, "task", None) in SUPERVISED_TASKS:
            _until_told(request, lambda: self._notify(task_id, TaskState.SUCCEEDED, request))
        self._complete_calls(task_id, request)
        return answer

    def _notify(self, task_id: str, state: TaskState, request: Any) -> None:
        """Have the URLs called that the task names for this end; under fixed ids, for this may be a replay."""
        for number, named in enumerate(_notices(request, state)):
            name, queue = notice_task(named)
            self.app.send_task(
                name,
                args=(task_id, number),
                task_id=str(uuid.uuid5(_NOTICES, f"{task_id}/{state}/{number}")),
                queue=queue,
                ignore_result=True,
            )

    def _commit_is_refused(self, task_id: str, request: Any, state: TaskState, exc: BaseException) -> bool:
        """Commit an end without a result to the record; say whether the record refuses it: another attempt counts."""
        name = getattr(request, "task", None) or getattr(request, "name", None)
        is_plain = bool(getattr(request, RECORDED_HEADER, None))
        if name not in SUPERVISED_TASKS and not is_plain:
            return False
        holder = self.attempts.of(task_id)
        wanted = self._state_for(exc, state)
        error = error_record(exc)
        if is_plain:  # its callers raise what the function has raised
            error[EXCEPTION] = self.prepare_exception(exc)
        if self.ledger.commit(task_id, wanted, holder=holder, error=error):
            self._notify(task_id, wanted, request)
            return False
        if getattr(request, FUNCTION_HEADER, None) and self.ledger.find(task_id) is None:
            return False  # its sender wrote none, and it has not begun; or it was replaced: it is Celery's alone
        log.warning("late_end_refused", task=task_id, attempt=holder and holder.attempt, wanted=str(wanted))
        return True

    @staticmethod
    def _state_for(exc: BaseException, default: TaskState) -> TaskState:
        if is_of_function(exc):  # it may be what another task has raised, passed on
            return default
        return {"TaskCancelled": TaskState.CANCELLED, "TaskDead": TaskState.DEAD}.get(type(exc).__name__, default)
