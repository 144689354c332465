"""Calls of a warm function that are answered together: what a task says of them, and what its function is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, Final

from gpuflow.errors import InvalidTemplate
from gpuflow.spec.units import duration_seconds

#: No batch is larger: a worker has a thread for each call that it follows.
MOST_CALLS: Final = 4096
#: A batch waits no longer for its calls, in seconds.
MOST_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Batch:
    """How many calls are answered together: at most `max_size`, none that has waited `max_wait` seconds for others."""

    max_size: int
    max_wait: float = 0.01


@dataclass(frozen=True)
class BatchedCall:
    """One call of a batch: its task id and its arguments."""

    id: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def batch(max_size: int, max_wait: float | str = 0.01) -> Batch:
    """Let the function of a warm task be given lists of calls: `@app.task(keep_warm="10m", batch=batch(64))`.

    It is called with a list of `BatchedCall`, of 1 to `max_size`, and returns as many results in the same order; an
    exception in the place of one lets that call fail alone. The first call of a list has waited at most `max_wait`
    (seconds, or text such as "20ms") for the others. Raises InvalidTemplate.
    """
    try:
        seconds = duration_seconds(max_wait)
    except ValueError as error:
        raise InvalidTemplate(f"batch: max_wait {max_wait!r} {error}") from None
    if isinstance(max_size, bool) or not isinstance(max_size, int) or not 1 <= max_size <= MOST_CALLS:
        raise InvalidTemplate(f"batch: max_size is {max_size!r}; it must be a number from 1 to {MOST_CALLS}")
    if not 0 <= seconds <= MOST_SECONDS:
        raise InvalidTemplate(f"batch: max_wait is {max_wait!r}; it must be from 0 to {MOST_SECONDS:g} s")
    return Batch(max_size, seconds)


@cache
def one_of(function: Callable[[list[BatchedCall]], Sequence[Any]], name: str) -> Callable[..., Any]:
    """Return a function that makes one call of a batch by itself, where nothing keeps it warm, and in a direct call."""

    @wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        result = answers(function, [BatchedCall("", args, kwargs)], name)[0]
        if isinstance(result, BaseException):
            raise result
        return result

    return alone


def answers(function: Callable[[list[BatchedCall]], Sequence[Any]], calls: list[BatchedCall], name: str) -> list[Any]:
    """Return what a function gives for each of some calls. Raises what it raises, and WrongBatch."""
    given = list(function(calls))
    if len(given) != len(calls):
        raise WrongBatch(f"{name} returned {len(given)} results for a batch of {len(calls)} calls")
    return given


class WrongBatch(ValueError):
    """A function returned another number of results than it was given calls."""
