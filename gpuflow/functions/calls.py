"""One call of a team's function, as its worker sends it to a child, and how the child tells its end.

Arguments and results are JSON as Celery's own serializer writes it: dates, UUIDs and decimals arrive as what they were.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from kombu.utils.json import dumps, loads, object_hook

from gpuflow.protocol import whole_text

#: Header of a message that is one: it has a record, and runs in a child.
FUNCTION_HEADER: Final = "gpuflow_function"
#: Its value where a template calls the function: it runs in a child whatever its task says, and how it ends is how the
#: task of the template ends. The second one: the template has no word on GPUs.
TEMPLATED: Final = 2
TEMPLATED_WITHOUT_RESOURCES: Final = 3
#: Event by which a child sets Celery's state of its task.
STATE_EVENT: Final = "celery_state"
#: The event by which a warm one tells that it takes another number of calls from now on.
PLACES: Final = "places"
#: The error of calls of a warm one that are to be made elsewhere: they were not answered, by no fault of theirs.
CLOSING: Final = "SessionClosing"
#: The line on a child's stdin that tells it of its soft time limit.
SOFT_LIMIT: Final = b"soft time limit"
#: The line that tells it that its attempt is to end soon, and another one goes on.
NOTICE: Final = b"notice"
#: Field of a record's error that holds the exception as Celery stores it.
EXCEPTION: Final = "celery"
#: Field of the error of a finish whose child has left an `Ending`.
TOLD: Final = "told"
#: What the fields of a request begin with that are for workers: in the child, the call is one like any other.
_OF_WORKERS: Final = "gpuflow_"
#: Marks the exceptions of functions.
_OF_FUNCTION: Final = "_gpuflow_of_function"
#: Of Celery's request, what the child makes itself.
_OWN: Final = frozenset({"args", "kwargs", "called_directly", "is_eager"})
#: Options of a call that name objects of the process; who sends it has their like.
_OF_THE_PROCESS: Final = frozenset({"task_type", "result_cls", "producer", "publisher", "connection", "router"})


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call. `modules` register the function, `app` is `module:attribute` of its app, or "" where none is known.

    `path` is where the worker's interpreter looks for modules. `environ` are variables that the child sets itself: what
    it is started with, other processes of its user may read.
    """

    name: str
    modules: Sequence[str]
    arguments: str
    request: Mapping[str, Any]
    app: str = ""
    path: Sequence[str] = ()
    cwd: str = ""
    log_level: int = 20
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any], **more: Any) -> Self:
        """Return the call that a worker has at hand. Raises kombu's EncodeError for arguments that are no JSON."""
        return cls(
            name=task.name,
            arguments=dumps([list(args), dict(kwargs)]),
            request=_told_of(vars(task.request)),
            **more,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as it stands in the request of the child."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read `to_dict()`."""
        return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data})

    def args_kwargs(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments."""
        args, kwargs = loads(self.arguments)
        return args, kwargs


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a call ended that returned nothing: the exception as Celery stores it, and what Celery is to do, by `kind`.

    It goes by a file, whole: what a retry is called with has come in a message and goes back into one, and is nobody's
    to hide secrets in or to cut. The name of the file is none of those in whose text that is done.
    """

    flow: Mapping[str, Any] = field(default_factory=dict)
    exception: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""

    FILE = ".function.end"

    def leave(self, folder: Path) -> None:
        """Write it for the worker; it appears by rename. Raises OSError."""
        fresh = folder / f"{self.FILE}.new"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(asdict(self), file)
        fresh.replace(folder / self.FILE)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what a child has left. Raises ValueError."""
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")
        return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data})


def is_templated(request: Mapping[str, Any]) -> bool:
    """Say whether a request is the call of a function by a template."""
    return request.get(FUNCTION_HEADER) in (TEMPLATED, TEMPLATED_WITHOUT_RESOURCES)


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call as JSON holds them, for the worker to send it. Raises TypeError."""
    told = {name: value for name, value in options.items() if name not in _OF_THE_PROCESS and value is not None}
    made: dict[str, Any] = plain(told)
    return made


def plain(value: Any) -> Any:
    """Return a value as JSON holds it, for a record. Raises TypeError for what Celery could not store either."""
    return json.loads(whole_text(dumps(value)))


def given(value: Any) -> Any:
    """Return the value that `plain` was made of. Raises what the reader of a type makes of a value that is none."""
    return loads(json.dumps(value))


def given_or_plain(value: Any) -> Any:
    """Return the value that `plain` was made of; what of it looks like a type of kombu's, and is none, as it is."""
    try:
        return given(value)
    except Exception:  # noqa: BLE001  (whatever the reader of a type raises)
        try:
            return _given_where_it_can(value)
        except RecursionError:
            return value


def _given_where_it_can(value: Any) -> Any:
    if isinstance(value, list):
        return [_given_where_it_can(item) for item in value]
    if not isinstance(value, dict):
        return value
    read = {name: _given_where_it_can(item) for name, item in value.items()}
    try:
        return object_hook(read)
    except Exception:  # noqa: BLE001  (as above)
        return read


def stored(error: BaseException) -> dict[str, Any]:
    """Return an exception as Celery stores it with its JSON serializer."""
    from celery.utils.serialization import ensure_serializable

    kind = type(error)
    return {
        "exc_type": getattr(kind, "__qualname__", kind.__name__),
        "exc_message": plain(ensure_serializable(error.args, dumps)),
        "exc_module": kind.__module__,
    }


def raised(exception: Mapping[str, Any], trace: str, backend: Any) -> Exception | None:
    """Return an exception that a child has stored, with its traceback; None for none that can be made again.

    One of a class that this process does not have says so; it is stored by its own name, for those who have it.
    """
    from celery.utils.serialization import UnpickleableExceptionWrapper

    made = backend.exception_to_python(dict(exception)) if exception else None
    if not isinstance(made, Exception):
        return None
    module, name = str(exception.get("exc_module") or ""), str(exception.get("exc_type"))
    if module and type(made).__module__ != module:
        made = UnpickleableExceptionWrapper(module, name, made.args, text=f"{name}{made.args!r}")
    if trace:
        made.__cause__ = _Remote(trace)
    made.__dict__[_OF_FUNCTION] = True
    return made


def is_of_function(error: BaseException) -> bool:
    """Say whether an exception is one that a function has raised in its child."""
    return _OF_FUNCTION in vars(error)


class _Remote(Exception):
    """The traceback of a child, as the cause of what it has raised."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def trace_of(error: BaseException) -> str:
    """Return the traceback of an exception."""
    return "".join(traceback.format_exception(error))


def _of_senders(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in headers.items() if not name.startswith(_OF_WORKERS)}


def _told_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of Celery's request is JSON, with what others have added to it."""
    told = {}
    for name, value in request.items():
        if name in _OWN or name.startswith(("_", _OF_WORKERS)) or value is None:
            continue
        try:
            told[name] = plain(_of_senders(value) if name == "headers" and isinstance(value, Mapping) else value)
        except (TypeError, ValueError):
            continue
    return told
