"""Calls a team's function in its child, with everything that Celery has around a call, and tells how that ended.

Both kinds of child do it by this: the one of a single call (`gpuflow.functions.__main__`), and the one that stays warm
(`gpuflow.functions.warm`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from celery import _state, signals
from celery.app.trace import setup_worker_optimizations
from celery.exceptions import Ignore, Reject, Retry

from gpuflow.context import Stopped
from gpuflow.errors import GPUFlowError
from gpuflow.functions.calls import STATE_EVENT, TOLD, Call, Ending, given, own_options, plain, stored, trace_of
from gpuflow.importing import load
from gpuflow.policy.secrets import is_never
from gpuflow.protocol import PREEMPTED, Emitter, Request
from gpuflow.surroundings import InChild, begin_child

# What every function needs: the process that children are forked from has it, too.
load("gpuflow.celery_app")

#: Exit codes of the child of one call. STOPPED: it was told to end, and has.
COMPLETED: Final = 0
FAILED: Final = 1
STOPPED: Final = 143
#: Longest message of an error in an event; the whole of it goes by the file of the end.
_MESSAGE_CHARACTERS: Final = 10_000
#: Within it, a soft limit may interrupt; until what it yields is called.
Interruptible = Callable[[], AbstractContextManager[Callable[[], None]]]


class Replaced(Ignore):  # type: ignore[misc]
    """The function has replaced itself by a signature."""

    def __init__(self, signature: Mapping[str, Any]) -> None:
        super().__init__("replaced by another task")
        self.signature = signature


class Again:
    """What a call sends under its own id: its retry, which the worker sends for it."""

    def __init__(self, call: Call) -> None:
        self._of = call
        self.call: dict[str, Any] | None = None

    def __call__(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
        """Say whether a call is that, and keep it; the last one counts."""
        is_own = options.get("task_id") == self._of.request.get("id") and name == self._of.name
        if not is_own or not options.get("retries"):
            return False
        self.call = {"args": plain(list(args or ())), "kwargs": plain(dict(kwargs)), "options": own_options(options)}
        return True


def become(call: Call) -> None:
    """Make this process what its worker is: its variables, its path, its folder, its level of logging."""
    os.environ.update(call.environ)
    sys.path[:] = call.path
    with contextlib.suppress(OSError):  # a sandbox does not show it
        os.chdir(call.cwd)
    logging.basicConfig(level=call.log_level, stream=sys.stderr, format="[%(asctime)s: %(levelname)s] %(message)s")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def begin(call: Call) -> Any:
    """Import what the worker has of the team's, and return the task that a call names, loaded.

    Raises ImportError, LookupError, and what its modules and its `load` raise.
    """
    task = find(call)
    signals.worker_process_init.send(sender=None)
    if task.warm_name:
        task.ensure_loaded()
    return task


def find(call: Call) -> Any:
    """Return the task that a call names. Raises ImportError, LookupError, and what its modules raise."""
    home, _, attribute = call.app.partition(":")
    apps = []
    if home:
        with contextlib.suppress(ImportError, AttributeError):
            apps.append(getattr(importlib.import_module(home), attribute))
    for app in apps:
        signals.import_modules.send(sender=app)  # Celery's fixup of Django sets that up then
    for module in call.modules:
        importlib.import_module(module)
    apps += sorted(_state._get_active_apps(), key=lambda one: call.name in one._tasks, reverse=True)
    for app in apps:
        app.finalize(auto=True)
        if call.name in app.tasks:
            setup_worker_optimizations(app, call.request.get("hostname"))
            for name in filter(is_never, list(os.environ)):  # the app has read them; what it starts may not
                del os.environ[name]
            return app.tasks[call.name]
    raise LookupError(f"{', '.join(call.modules)} registers no task {call.name}")


def conduct(
    call: Call, request: Request, emitter: Emitter, task_of: Callable[[], Any], interruptible: Interruptible
) -> int:
    """Make a call and tell how it ended; return the exit code of a child that made it.

    `task_of` returns its task, or raises.
    """
    again, child = Again(call), begin_child(request, emitter)
    try:
        with interruptible() as over:  # a soft limit raises in here alone, also in what is imported first, and in hooks
            result = _answer(task_of(), call, again, emitter, child, over)
        if again.call is not None:
            raise Retry("the task has asked for a retry")
    except Stopped as stop:
        emitter.finish("cancelled", {"type": PREEMPTED, "message": cut(stop), "retryable": True})
        return STOPPED
    except Exception as error:  # noqa: BLE001  (whatever the function raises is how the task ends)
        fail(error, request.output_dir, emitter, again.call)
        return FAILED
    if child.is_cancelled:  # it has cleaned up: what it returned then is no result
        emitter.finish("cancelled")
        return STOPPED
    emitter.result(result)
    emitter.finish("completed")
    return COMPLETED


def fail(error: Exception, output_dir: str, emitter: Emitter, again: Mapping[str, Any] | None = None) -> None:
    """Tell that a call has ended by an exception, or by a word to Celery that is one.

    Where the whole of it cannot be left for the worker, it is a failure all the same.
    """
    told = {"type": type(error).__name__, "message": cut(error), "retryable": False, TOLD: True}
    try:
        _ended(error, again).leave(Path(output_dir))
    except OSError as cause:
        told = {"type": "Failed", "message": cut(f"{told['type']}: {told['message']} ({cause})"), "retryable": False}
    emitter.finish("failed", told)


def cut(message: object) -> str:
    """Return a message for an event, whose line has a bound."""
    text = str(message)
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]} ..."


def _answer(
    task: Any, call: Call, again: Again, emitter: Emitter, child: InChild, over: Callable[[], None]
) -> dict[str, Any]:
    """Return what the function returns, and the results of what it has called. Raises what it raises."""
    args, kwargs = call.args_kwargs()
    with _called(task, call, args, kwargs, again, emitter, over):
        try:
            value = task(*args, **kwargs)
        except Stopped as stop:
            if not child.should_stop():
                raise GPUFlowError(f"context.Stopped ({stop}) was raised, and should_stop() says no") from stop
            raise
        over()  # what it returns is what it has done
        value = task.backend.prepare_value(value)  # a result of another call is stored as its ids
        return {"value": plain(value), "children": plain([one.as_tuple() for one in task.request.children or ()])}


@contextmanager
def _called(
    task: Any,
    call: Call,
    args: list[Any],
    kwargs: dict[str, Any],
    again: Again,
    emitter: Emitter,
    over: Callable[[], None],
) -> Iterator[None]:
    """Make a task what it is in Celery's own processes: its request, the current task, its signals and hooks.

    What Celery would send for it, the worker sends: its retry, and what it is replaced by. `over` is called when it has
    ended.
    """
    own_id = call.request.get("id")

    def update_state(task_id: str | None = None, state: str | None = None, meta: Any = None, **more: Any) -> None:
        if task_id in (None, own_id):
            emitter.emit(STATE_EVENT, state=state, meta=plain(meta))
        else:
            task.backend.store_result(task_id, meta, state, **more)

    def on_replace(signature: Any) -> NoReturn:
        raise Replaced(plain(signature))

    about = {"task_id": own_id, "task": task, "args": args, "kwargs": kwargs}
    request = {name: given(value) for name, value in call.request.items()}
    stacks = ((_state._task_stack, len(_state._task_stack)), (task.request_stack, len(task.request_stack)))
    requeues_run = task.app.requeues_run
    state, value = "FAILURE", None
    try:
        task.app.requeues_run = again
        task.update_state, task.on_replace = update_state, on_replace
        _state._task_stack.push(task)
        task.push_request(**{**request, "args": args, "kwargs": kwargs}, called_directly=False, is_eager=False)
        signals.task_prerun.send(sender=task, **about)
        task.before_start(own_id, args, kwargs)
        yield
        state = "SUCCESS"
    except Exception as error:
        state = "RETRY" if isinstance(error, Retry) else "IGNORED" if isinstance(error, Ignore) else state
        value = error
        raise
    finally:
        over()
        signals.task_postrun.send(sender=task, **about, retval=value, state=state)
        task.app.requeues_run = requeues_run
        for name in ("update_state", "on_replace"):
            vars(task).pop(name, None)
        for stack, depth in stacks:
            while len(stack) > depth:
                stack.pop()


def _ended(error: Exception, again: Mapping[str, Any] | None) -> Ending:
    """Return how a call ended that returned nothing: an exception, or a word to Celery that is one.

    `again` is the retry that it has asked for: that counts, however it went on.
    """
    if isinstance(error, Replaced):
        return Ending(flow={"kind": "replace", "signature": error.signature})
    if isinstance(error, Ignore):
        return Ending(flow={"kind": "ignore"})
    if isinstance(error, Reject):
        return Ending(flow={"kind": "reject", "reason": str(error.reason), "requeue": bool(error.requeue)})
    traceback.print_exception(error)
    cause = error.exc if isinstance(error, Retry) and isinstance(error.exc, BaseException) else error
    if again is None and not isinstance(error, Retry):
        return Ending(exception=stored(error), traceback=trace_of(error))
    flow = {"kind": "retry", "call": again, "message": str(error)}
    return Ending(flow=flow, exception=stored(cause), traceback=trace_of(error))
