"""A class whose methods are tasks, answered by one loaded object: `@app.task(keep_warm="10m")` on a class."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from gpuflow.errors import InvalidTemplate


class WarmClass:
    """What a decorated class becomes: its tasks by the names of its methods; `cls` is the class itself."""

    def __init__(self, cls: type, tasks: Mapping[str, Any]) -> None:
        self.cls = cls
        self.tasks = dict(tasks)
        self.__doc__ = cls.__doc__
        vars(self).update(tasks)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Let a class that is made of this one be made of the class itself."""
        return (self.cls,)

    def __repr__(self) -> str:
        return f"<{self.cls.__qualname__}: tasks {', '.join(self.tasks)}>"


class _Loaded:
    """The object of a class in this process, made and loaded when it is first needed."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._lock = threading.RLock()
        self._object: Any = None

    def get(self) -> Any:
        """Return it. Raises what its constructor and its `load` raise."""
        with self._lock:
            if self._object is None:
                self._object = self._cls()  # its `load` may call its own tasks
                try:
                    getattr(self._object, "load", _nothing)()
                except BaseException:
                    self._object = None
                    raise
            return self._object


def _nothing() -> None:
    """Load nothing."""


def is_warm_class(target: Any, base: type) -> bool:
    """Say whether what is decorated is a class of a team, and no class of tasks."""
    return isinstance(target, type) and not issubclass(target, base)


def tasks_of(app: Any, cls: type, options: Mapping[str, Any]) -> WarmClass:
    """Register a task for each public method of a class but `load`; static and class methods are none.

    Raises InvalidTemplate for one without any.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    if not options.get("keep_warm"):
        raise InvalidTemplate(f"class {name} is decorated as a task; say for how long it stays loaded: keep_warm='10m'")
    if options.get("bind"):
        raise InvalidTemplate(f"class {name}: bind is for functions; a method has its object")
    methods = {
        attribute: function
        for attribute, function in inspect.getmembers(cls, inspect.isfunction)
        if not attribute.startswith("_") and attribute != "load"
        if inspect.isfunction(inspect.getattr_static(cls, attribute))
    }
    if not methods:
        raise InvalidTemplate(f"class {name} has no public method beside load: nothing of it can be called")
    loaded = _Loaded(cls)
    own = {**options, "warm_as": name, "load": staticmethod(loaded.get)}
    prefix = str(own.pop("name", None) or name)
    return WarmClass(
        cls,
        {
            attribute: app.task(_of_object(loaded, attribute, function), name=f"{prefix}.{attribute}", **own)
            for attribute, function in methods.items()
        },
    )


def _of_object(loaded: _Loaded, attribute: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method as a function: it is called on the object of the process."""

    @wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return getattr(loaded.get(), attribute)(*args, **kwargs)

    parameters = list(inspect.signature(function).parameters.values())
    method.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
    return method
