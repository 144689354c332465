"""The base classes of every task of the gpuflow app, ours and a team's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any, ClassVar, Final

from celery import Task
from celery.exceptions import Reject
from celery.utils.imports import symbol_by_name

from gpuflow.broker.merged_calls import RECORDED_HEADER
from gpuflow.context import Stopped
from gpuflow.errors import GPUFlowError, InvalidTemplate
from gpuflow.functions.batching import Batch
from gpuflow.functions.calls import FUNCTION_HEADER
from gpuflow.routing.families import CELERYS, SPEC_OPTION
from gpuflow.routing.resources import asks_gpus
from gpuflow.spec.units import duration_seconds
from gpuflow.surroundings import here, is_child, is_worker
from gpuflow.typed_arguments import TypedArguments

#: Of a thread of a worker: how many calls of tasks run in it, one in the other.
_calls: Final = threading.local()


class RoutedTask(Task):  # type: ignore[misc]
    """A Celery task that is routed by what it asks for, and run as it stands."""

    Request: ClassVar[str] = "gpuflow.worker.celery_request:GPURequest"
    #: What the task asks for: a token such as `A100:1`, a list of alternatives, or the long form; None for nothing.
    resources: str | list[str] | Mapping[str, Any] | None = None
    #: Whether equal calls are merged: True, or a function of the arguments that returns what is equal in equal calls
    #: (None: this call is not merged).
    merge: bool | Callable[..., str | None] | None = None
    #: For how many seconds a result answers further equal calls.
    merge_result_ttl: float = 0

    def runs_in_child(self, asks: bool) -> bool:
        """Whether a call runs in a child, that `asks` for GPUs or not."""
        return False


class GPUTask(RoutedTask):
    """A Celery task that may ask for hardware: `@app.task(resources="A100:1")`."""

    #: Whether it runs in a child process of its own (`worker.function_delivery`); None: where it asks for GPUs.
    child: bool | None = None
    #: For how long the process of a call stays for further ones, idle: a duration such as "10m", or seconds; None: the
    #: process ends with its call.
    keep_warm: str | float | None = None
    #: How calls of a warm task are answered together (`gpuflow.batch`); None: one after the other.
    batch: Batch | None = None
    #: The function of a batch.
    batched: Callable[..., Any] | None = None
    #: What tasks share that one loaded process answers: those of one class; None: each is by itself.
    warm_as: str | None = None

    def load(self) -> None:
        """Load what the calls of a warm task need: called once in each process, before the first of them."""

    @cached_property
    def warm_name(self) -> str:
        """What the calls have in common that one warm process answers; "" for a task that is not kept warm."""
        return str(self.warm_as or self.name) if self.keep_warm else ""

    @cached_property
    def keep_seconds(self) -> float | None:
        """For how long a warm process stays idle, in seconds; None for a task that is not kept warm."""
        return duration_seconds(self.keep_warm) if self.keep_warm else None

    @property
    def loading_places(self) -> int:
        """How many calls may wait while the first one loads; 0 for a task that is not kept warm."""
        if not self.warm_name:
            return 0
        return self.batch.max_size if self.batch is not None else 1

    def ensure_loaded(self) -> None:
        """Load what the calls need, once in this process."""
        with self.__dict__.setdefault("_loading", threading.RLock()):
            if not self.__dict__.get("_is_loaded"):
                self._is_loaded = True  # its `load` may call it
                try:
                    self.load()
                except BaseException:
                    self._is_loaded = False
                    raise

    @cached_property
    def in_child(self) -> bool:
        """Whether a call that says nothing else runs in a child. Raises InvalidTemplate for what cannot be asked."""
        return self.runs_in_child(asks_gpus(self.resources))

    def runs_in_child(self, asks: bool) -> bool:
        """Whether a call runs in a child, that `asks` for GPUs or not. Merged ones share the worker's process."""
        wanted = (asks or bool(self.keep_warm)) if self.child is None else self.child
        return not self.merge and not self.name.startswith(CELERYS) and wanted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task where it stands, or, merged with equal calls, by its record."""
        request = self.request
        if not request.called_directly and not request.is_eager and request.get(RECORDED_HEADER):
            return symbol_by_name("gpuflow.worker.merged_tasks:run")(self, args, kwargs)
        if self.warm_name:
            self.ensure_loaded()
        return super().__call__(*args, **kwargs)


class Dispatched:
    """What the class of every task of the app begins with: in a worker, nothing of a function in a child runs here.

    Its `before_start` and `__call__` do in the child; what Celery calls when it has ended runs in the worker.
    """

    #: What arguments a task with `pydantic=True` takes.
    typed_arguments: TypedArguments | None = None
    #: Whether those are checked where a call is sent, too. Where validators need what only workers have: False.
    check_arguments: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task, in a child if its message says so. Raises InvalidTemplate for arguments that it does not take.

        In a thread, one that ends because its worker does goes back to its queue.
        """
        task: Any = self
        if _goes_to_child(task.request):
            return symbol_by_name("gpuflow.worker.function_delivery:run")(task, args, kwargs)
        if task.request.called_directly or task.request.is_eager:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self.typed_arguments is not None:
            self.typed_arguments.check(task, args, kwargs)
        try:
            with _calling():
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Stopped as stop:
            if is_child():
                raise
            if not here().should_stop():
                raise GPUFlowError(f"context.Stopped ({stop}) was raised, and should_stop() says no") from stop
            raise Reject(str(stop), requeue=True) from stop

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Send a call. Raises InvalidTemplate, with the fields, for arguments that the task does not take.

        What follows a task (its links, the body of a chord) is sent by a worker, and fails where it runs. So does a
        call by a template: which process sends it, and whether that has the function, makes no difference.
        """
        task: Any = self
        if SPEC_OPTION in options:
            return task.app.send_task(task.name, args, kwargs, task_type=task, **options)
        if self.typed_arguments is not None and self.check_arguments and (not is_worker() or _is_calling()):
            args, kwargs = task._dump_pydantic_arguments(args, kwargs)
            if isinstance(args or (), list | tuple) and isinstance(kwargs or {}, Mapping):
                self.typed_arguments.check(task, args or (), kwargs or {})
        return super().apply_async(args, kwargs, *more, **options)  # type: ignore[misc]

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Do what the team's class does before a call."""
        task: Any = self
        if not _goes_to_child(task.request):
            super().before_start(task_id, args, kwargs)  # type: ignore[misc]


@contextmanager
def _calling() -> Iterator[None]:
    _calls.depth = getattr(_calls, "depth", 0) + 1
    try:
        yield
    finally:
        _calls.depth -= 1


def _is_calling() -> bool:
    """Whether a function of a task runs in this thread, and not what follows it."""
    return getattr(_calls, "depth", 0) > 0


def _goes_to_child(request: Any) -> bool:
    return not request.called_directly and not request.is_eager and bool(request.get(FUNCTION_HEADER))


@cache
def dispatched(base: type) -> type:
    """Return the class of tasks of the app for a class of tasks of a team, or for one of ours."""
    if issubclass(base, Dispatched) or (issubclass(base, RoutedTask) and not issubclass(base, GPUTask)):
        return base
    bases = (Dispatched, base) if issubclass(base, GPUTask) else (Dispatched, base, GPUTask)
    bases = (Dispatched, GPUTask) if issubclass(GPUTask, base) else bases
    return type(base.__name__, bases, {"__module__": base.__module__, "__doc__": base.__doc__})


def check_options(task: Any) -> None:
    """Raise InvalidTemplate for a task that asks for what cannot be asked for: at its registration, not at a call."""
    if not isinstance(task, GPUTask):
        return
    try:
        _check_warm(task)
        task.in_child  # noqa: B018  (what it raises)
    except InvalidTemplate as error:
        raise InvalidTemplate(f"task {task.name}: {error}") from None


def _check_warm(task: GPUTask) -> None:
    if task.batch is not None and (not isinstance(task.batch, Batch) or not task.keep_warm):
        raise InvalidTemplate("batch is what gpuflow.batch(max_size, max_wait) returns, beside keep_warm")
    if not task.keep_warm:
        return
    try:
        seconds = task.keep_seconds
    except ValueError as error:
        raise InvalidTemplate(f"keep_warm {task.keep_warm!r} {error}") from None
    if not seconds:
        raise InvalidTemplate(f"keep_warm {task.keep_warm!r} keeps nothing; give a time, or leave it out")
    for other, is_given in (("merge", bool(task.merge)), ("child=False", task.child is False)):
        if is_given:
            raise InvalidTemplate(f"keep_warm and {other} exclude each other: it is a process of its own that stays")
