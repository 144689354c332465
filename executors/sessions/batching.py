"""Which of the waiting prompts go through the model together: requests of one kind, fairly mixed. Pure, thread-safe.

A call is a request that has been read; a unit is one prompt of it. Calls with equal `key` may share a batch. A call
that is `alone` shares with nobody, as its answer depends on the generator of random numbers. A unit that is `alone` is
a batch by itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the queue needs to know of a call."""

    @property
    def key(self) -> Hashable:
        """Equal for calls that may share a batch."""

    @property
    def alone(self) -> bool:
        """Whether it shares with nobody."""

    @property
    def batch_size(self) -> int:
        """Most units of a batch; equal for calls of one key."""


C = TypeVar("C", bound=Waiting)


@dataclass(frozen=True, kw_only=True)
class Unit(Generic[C]):
    """One prompt of a call, by its number."""

    call: C
    index: int
    alone: bool = False


@dataclass(eq=False)
class _Line(Generic[C]):
    call: C
    units: deque[Unit[C]] = field(default_factory=deque)


class BatchQueue(Generic[C]):
    """The calls that wait, oldest first; one that was served goes to the back."""

    def __init__(self) -> None:
        self._lines: deque[_Line[C]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, call: C, units: Iterable[Unit[C]]) -> None:
        """Add a call with its units."""
        with self._changed:
            self._lines.append(_Line(call, deque(units)))
            self._changed.notify()

    def drop(self, call: C) -> None:
        """Forget what is left of a call."""
        with self._changed:
            self._lines = deque(line for line in self._lines if line.call is not call)

    def close(self) -> None:
        """Let `next_batch` return nothing from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def next_batch(self) -> list[Unit[C]]:
        """Wait for units and return a batch of them; empty once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._lines)
            return [] if self._closed else self._batch()

    def _batch(self) -> list[Unit[C]]:
        first = self._lines[0]
        size = max(1, first.call.batch_size)
        if first.units[0].alone:
            batch = [first.units.popleft()]
            served = [first]
        else:
            served = (
                [first]
                if first.call.alone
                else [
                    line
                    for line in self._lines
                    if line.call.key == first.call.key and not line.call.alone and not line.units[0].alone
                ]
            )
            batch = _mixed(served, size)
            given = {id(unit.call) for unit in batch}
            served = [line for line in served if id(line.call) in given]
        self._requeue(served)
        return batch

    def _requeue(self, served: list[_Line[C]]) -> None:
        """Put those at the back that gave a unit; whoever got no place in the batch keeps its turn."""
        rest = [line for line in self._lines if line not in served]
        self._lines = deque([*rest, *(line for line in served if line.units)])


def _mixed(lines: list[_Line[C]], size: int) -> list[Unit[C]]:
    """Take up to `size` units, one of each line in turn; those of one line stand together."""
    free = [_free(line) for line in lines]
    share = [0] * len(lines)
    room = min(size, sum(free))
    while room:
        for number in range(len(lines)):
            if room and share[number] < free[number]:
                share[number] += 1
                room -= 1
    return [line.units.popleft() for line, count in zip(lines, share, strict=True) for _ in range(count)]


def _free(line: _Line[C]) -> int:
    """How many units come before the first that must be alone."""
    return next((number for number, unit in enumerate(line.units) if unit.alone), len(line.units))
