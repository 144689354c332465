"""Whether a failed attempt is tried again, and when. Pure.

The executor's finish event, exit code and signal have become an error record before (`worker.attempt`); this file
decides by that record, the failures so far and the task's `retry` section alone. Lost workers and preempted attempts
are counted by the ledger and never get here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.ledger.states import TaskState

DEFAULT_MAX_ATTEMPTS: Final = 3
DEFAULT_BACKOFF_SECONDS: Final = 10.0
#: Longest wait before another attempt, in seconds.
MAX_BACKOFF_SECONDS: Final = 600.0
#: For so long, at most, a task that failed on a worker is left to the other workers of its queue, in seconds.
AVOID_SECONDS: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Again:
    """Try again after `delay_seconds`."""

    delay_seconds: float


@dataclass(frozen=True, kw_only=True)
class End:
    """The task ends in `state`, with the error as users are to see it."""

    state: TaskState
    error: Mapping[str, Any]


def decide(
    error: Mapping[str, Any],
    failures: int,
    retry: Mapping[str, Any] | None,
    jitter: Callable[[], float] = random.random,
) -> Again | End:
    """Say what follows on a failure; `failures` counts those before it, `jitter` gives a number from 0 to 1.

    The wait doubles with each failure and is drawn from its upper half, so that tasks that failed together do not
    come back together. A failure that no attempt can mend is FAILED; one that used up the attempts is DEAD.
    """
    if not error.get("retryable"):
        return End(state=TaskState.FAILED, error=error)
    given = retry or {}
    most = int(given.get("max_attempts") or DEFAULT_MAX_ATTEMPTS)
    if failures + 1 >= most:
        return End(state=TaskState.DEAD, error={**error, "attempts": failures + 1})
    base = given.get("backoff_seconds")
    longest = DEFAULT_BACKOFF_SECONDS if base is None else float(base)
    wait = longest * float(2 ** min(failures, 30))
    cap = max(MAX_BACKOFF_SECONDS, longest)
    return Again(delay_seconds=min(wait, cap) * (0.5 + 0.5 * jitter()))
