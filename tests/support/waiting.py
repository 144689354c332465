"""Waiting for a condition, never for time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], *, within: float = 30.0, what: str = "") -> T:
    """Return the first true value of `condition`; fail after `within` seconds, with the last value in the message."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what or 'the condition'} did not come true within {within:g} s; last: {value!r}")
        time.sleep(0.02)
