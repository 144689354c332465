"""The child of one call of a team's function: `python -m gpuflow.functions`, started by a worker (`worker.functions`).

It imports what the worker has imported of the team's, with the worker's own path and environment, and calls the
function on its main thread, so that a limit interrupts whatever it waits for. What comes of it goes to the worker,
which tells Celery.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from celery import _state, signals
from celery.app.trace import setup_worker_optimizations
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from gpuflow.functions.calls import (
    SOFT_LIMIT,
    STATE_EVENT,
    TOLD,
    Call,
    Ending,
    given,
    own_options,
    plain,
    stored,
    trace_of,
)
from gpuflow.importing import load
from gpuflow.policy.secrets import is_never
from gpuflow.process_guard import guard_memory
from gpuflow.protocol import Emitter, Request, take_stdin

# What every function needs: the process that children are forked from has it, too.
load("gpuflow.celery_app")


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


def main() -> int:
    """Run one call to its end."""
    guard_memory()
    emitter = Emitter.claim_stdout()
    orders = take_stdin()
    request = Request.from_json(orders.readline().decode("utf-8"))
    emitter.output_dir = request.output_dir
    call = Call.from_dict(request.spec["function"])
    os.environ.update(call.environ)
    sys.path[:] = call.path
    with contextlib.suppress(OSError):  # a sandbox does not show it
        os.chdir(call.cwd)
    logging.basicConfig(level=call.log_level, stream=sys.stderr, format="[%(asctime)s: %(levelname)s] %(message)s")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    emitter.status("working")
    again = Again(call)
    try:
        try:  # a soft limit raises in here alone, also in what is imported first, and in hooks
            signal.signal(signal.SIGUSR2, _soft)
            threading.Thread(target=_listen, args=(orders,), name="gpuflow-orders", daemon=True).start()
            result = answer(call, again, emitter)
        finally:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if again.call is not None:
            raise Retry("the task has asked for a retry")
    except Exception as error:  # noqa: BLE001  (whatever the function raises is how the task ends)
        ended(error, again.call).leave(Path(request.output_dir))
        emitter.finish("failed", {"type": type(error).__name__, "message": str(error), "retryable": False, TOLD: True})
        return 1
    emitter.result(result)
    emitter.finish("completed")
    return 0


def answer(call: Call, again: Again, emitter: Emitter) -> dict[str, Any]:
    """Return what the function returns, and the results of what it has called. Raises what it raises."""
    task = find(call)
    args, kwargs = call.args_kwargs()
    with called(task, call, args, kwargs, again, emitter):
        value = task(*args, **kwargs)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # what it returns is what it has done
        value = task.backend.prepare_value(value)  # a result of another call is stored as its ids
        return {"value": plain(value), "children": plain([one.as_tuple() for one in task.request.children or ()])}


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


@contextmanager
def called(
    task: Any, call: Call, args: list[Any], kwargs: dict[str, Any], again: Again, emitter: Emitter
) -> Iterator[None]:
    """Make a task what it is in Celery's own processes: its request, the current task, its signals and hooks.

    What Celery would send for it, the worker sends: its retry, and what it is replaced by.
    """
    own_id = call.request.get("id")

    def update_state(task_id: str | None = None, state: str | None = None, meta: Any = None, **more: Any) -> None:
        if task_id in (None, own_id):
            emitter.emit(STATE_EVENT, state=state, meta=plain(meta))
        else:
            task.backend.store_result(task_id, meta, state, **more)

    def on_replace(signature: Any) -> NoReturn:
        raise Replaced(plain(signature))

    task.app.requeues_run = again
    task.update_state, task.on_replace = update_state, on_replace
    _state._task_stack.push(task)
    request = {name: given(value) for name, value in call.request.items()}
    task.push_request(**{**request, "args": args, "kwargs": kwargs}, called_directly=False, is_eager=False)
    about = {"task_id": own_id, "task": task, "args": args, "kwargs": kwargs}
    signals.worker_process_init.send(sender=None)
    signals.task_prerun.send(sender=task, **about)
    state, value = "FAILURE", None
    try:
        task.before_start(own_id, args, kwargs)
        yield
        state = "SUCCESS"
    except Exception as error:
        state = "RETRY" if isinstance(error, Retry) else "IGNORED" if isinstance(error, Ignore) else state
        value = error
        raise
    finally:
        signals.task_postrun.send(sender=task, **about, retval=value, state=state)


def ended(error: Exception, again: Mapping[str, Any] | None = None) -> Ending:
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


def _soft(*_: Any) -> NoReturn:
    raise SoftTimeLimitExceeded


def _listen(orders: BinaryIO) -> None:
    """Pass on what the worker says while the function runs. A signal interrupts a call that waits."""
    main_thread = threading.main_thread().ident
    for line in orders:
        if line.strip() == SOFT_LIMIT and main_thread is not None:
            signal.pthread_kill(main_thread, signal.SIGUSR2)


def leave(code: int) -> NoReturn:
    """End the process as Celery ends one of its pool: no thread is waited for, and nothing runs that could fail now."""
    with contextlib.suppress(Exception):
        signals.worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=code)
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run() -> NoReturn:
    """Run the call of this process, and end it, whatever comes of it."""
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (the log has it, and the worker the exit code)
        traceback.print_exc()
        code = 1
    leave(code & 0xFF)


if __name__ == "__main__":
    run()
