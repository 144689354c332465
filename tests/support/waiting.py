"""Waiting for a condition, never for time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

import psutil
from redis.exceptions import RedisError

T = TypeVar("T")

#: Every limit of a wait is multiplied by this: a wait that ends well costs nothing, a busy machine needs longer.
PATIENCE: Final = float(os.environ.get("TEST_PATIENCE", "1"))
#: Between two looks at a condition: what comes soon is seen soon, and looking for long costs little.
FIRST_PAUSE_SECONDS: Final = 0.02
LONGEST_PAUSE_SECONDS: Final = 0.1
#: What a condition may raise while that which it asks about comes up or goes away.
PASSING: Final = (OSError, psutil.Error, RedisError)


class BrokenPromise(AssertionError):
    """A promise of the product was broken (docs/architecture.md). A test that raises it is never tried again."""


def promised(kept: bool, message: str) -> None:
    """Raise BrokenPromise unless a promise of the product is kept."""
    if not kept:
        raise BrokenPromise(message)


def patient(seconds: float) -> float:
    """Return how long to wait for what takes `seconds` at most on a quiet machine, in seconds."""
    return seconds * PATIENCE


def eventually(condition: Callable[[], T], *, within: float = 30.0, what: str = "") -> T:
    """Return the first true value of `condition`; fail after `patient(within)` seconds, with the last value.

    What the condition raises of PASSING is a value that is not true; at the end it is the cause of the failure.
    """
    limit = patient(within)
    deadline = time.monotonic() + limit
    pause = FIRST_PAUSE_SECONDS
    while True:
        cause = None
        try:
            value: object = (found := condition())
            if found:
                return found
        except PASSING as error:
            value, cause = error, error
        if time.monotonic() > deadline:
            message = f"{what or 'the condition'} did not come true within {limit:g} s; last: {value!r}"
            raise AssertionError(message) from cause
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_PAUSE_SECONDS)
