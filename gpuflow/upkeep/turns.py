"""Turns: of several processes that keep the same folder in order, one does it at a time, and not too often.

Used by the cleaners of this package. A turn is a lock on a file in that folder, which holds when the last one was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gpuflow.filelocks import try_lock


@contextlib.contextmanager
def turn(path: Path, every_seconds: float, now: float) -> Iterator[bool]:
    """Hold the lock `path` if nobody does and the last turn is old enough; say so, and note the turn at its end.

    `now` in Unix seconds. Raises OSError.
    """
    with path.open("a+", encoding="ascii") as file:
        if not try_lock(file.fileno()):
            yield False
            return
        file.seek(0)
        if every_seconds and abs(now - _number(file.read(64))) < every_seconds:
            yield False
            return
        yield True
        file.truncate(0)
        file.write(f"{now:.3f}\n")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
