"""The part of an attempt before its child, fetching what it reads: it obeys the limits and orders of the whole attempt.

The work is done on a thread of its own, since a connection, a name server or a slow disk can hold it up for any time.
When the attempt is to stop, that thread is left alone: its result is dropped, and what other attempts use it asks for
(`is_waited_for`) before it changes that.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from gpuflow.worker.judging import StopReason

T = TypeVar("T")

#: Whoever waits for the preparation says so often that he lives, in seconds.
TICK_SECONDS: Final = 0.25


class Stopped(Exception):
    """The preparation was told to stop; `reason` says why."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


class PreparationTimeout(OSError):
    """The inputs of an attempt have not come in the time that an attempt may hold its GPUs without a child."""


class Preparing:
    """Runs the preparation of one attempt; other threads stop it as they stop an attempt.

    `deadline_seconds` is the time limit of the whole attempt (None: no limit), `most_seconds` that of its preparation.
    `on_tick` is called while it waits; it may call `stop`.
    """

    def __init__(
        self, *, deadline_seconds: float | None, most_seconds: float, on_tick: Callable[[], None] = lambda: None
    ) -> None:
        self.began_at = time.monotonic()
        self._deadline_seconds = deadline_seconds
        self._most_seconds = most_seconds
        self._on_tick = on_tick
        self._reason: StopReason | None = None
        self._waits = True
        self._ended: queue.Queue[Callable[[], object]] = queue.Queue()

    @property
    def reason(self) -> StopReason | None:
        """Why it was told to stop; None: it was not."""
        return self._reason

    @property
    def is_waited_for(self) -> bool:
        """Whether what the work brings is still wanted."""
        return self._waits and self._reason is None

    @property
    def seconds(self) -> float:
        """How long the attempt takes by now."""
        return time.monotonic() - self.began_at

    def stop(self, reason: StopReason, *, at_once: bool = False) -> None:
        """Stop waiting; the first reason counts, but for the loss of the lease."""
        if self._reason is None or reason in ("lost", "superseded"):
            self._reason = reason
        self._ended.put(_nothing)

    def run(self, work: Callable[[], T], what: str) -> T:
        """Do the work and return what it gives. Raises what it raises, Stopped, and PreparationTimeout."""
        found: list[T] = []

        def do() -> None:
            try:
                found.append(work())
                self._ended.put(_nothing)
            except BaseException as error:  # noqa: BLE001  (raised again where it is waited for)
                raised = error

                def again() -> None:
                    raise raised

                self._ended.put(again)

        threading.Thread(target=do, name="gpuflow-prepare", daemon=True).start()
        try:
            return self._wait(found, what)
        finally:
            self._waits = False

    def _wait(self, found: list[T], what: str) -> T:
        while True:
            try:
                self._ended.get(timeout=TICK_SECONDS)()
            except queue.Empty:
                self._on_tick()
            if self._reason is not None:
                raise Stopped(self._reason)
            if found:
                return found[0]
            if self._deadline_seconds is not None and self.seconds > self._deadline_seconds:
                raise Stopped("timeout")
            if self.seconds > self._most_seconds:
                raise PreparationTimeout(
                    f"{what} has not come in {self._most_seconds:g} s (GPUFLOW_PREPARE_SEC); does its source answer?"
                )


def _nothing() -> None:
    """Nothing was raised."""
