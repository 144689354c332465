"""Functions that stay warm and are killed by the chaos tests (`--include team_mortal`).

Each run of a call is noted in its folder: a file `<number>.<pid>` when it begins.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Task

from gpuflow import BatchedCall, app, batch
from gpuflow.functions import warm

# How many calls may wait in the process, and how long, is left to no machine: here, all do that were sent ahead.
for limit in ("_AHEAD_SECONDS", "_LONG_SECONDS"):
    assert limit in vars(warm), f"{warm.__name__} has no {limit} any more"
    setattr(warm, limit, 60.0)


def note(folder: str, number: int) -> None:
    """Say that a call has begun, and in which process."""
    Path(folder, f"{number}.{os.getpid()}").touch()


def wait_for(path: str) -> None:
    """Wait until a test lets go."""
    while path and not Path(path).exists():
        time.sleep(0.01)


@app.task(keep_warm="10m", bind=True, max_retries=2)
def single(self: Any, folder: str, number: int, until: str = "", retries: int = 0) -> int:
    """Answer, when a file is there, at the so many-th retry."""
    note(folder, number)
    wait_for(until)
    if self.request.retries < retries:
        raise self.retry(countdown=0.1)
    return 2 * number


@app.task(keep_warm="10m", batch=batch(4, "300ms"))
def together(calls: list[BatchedCall]) -> list[int]:
    """Answer lists of calls, each when its file is there; a negative number then kills the process."""
    for call in calls:
        note(*call.args[:2])
    for call in calls:
        wait_for(*call.args[2:3] or ("",))
    if any(call.args[1] < 0 for call in calls):
        os.kill(os.getpid(), signal.SIGKILL)
    return [2 * call.args[1] for call in calls]


@app.task(keep_warm="10m")
def other(folder: str, number: int) -> int:
    """Answer in a process of its own: what it needs, an idle one leaves to it."""
    note(folder, number)
    return 2 * number


def load_slowly() -> None:
    """Load until a test lets go."""
    Path(os.environ["SLOW_LOAD"], f"loads.{os.getpid()}").touch()
    wait_for(str(Path(os.environ["SLOW_LOAD"], "loaded")))


@app.task(keep_warm="10m")
class Slow:
    """One that loads slowly."""

    def load(self) -> None:
        """Load."""
        load_slowly()

    def answer(self, folder: str, number: int) -> int:
        """Answer."""
        note(folder, number)
        return 2 * number


class Loading(Task):  # type: ignore[misc]
    """Tasks that load slowly."""

    def load(self) -> None:
        """Load."""
        load_slowly()


@app.task(base=Loading, keep_warm="10m", batch=batch(4, "300ms"))
def slowly(calls: list[BatchedCall]) -> list[int]:
    """Answer lists of calls, once loaded."""
    return [2 * call.args[1] for call in calls]
