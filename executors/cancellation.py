"""Turns SIGTERM and SIGINT into the exception `Cancelled` in the main thread of a child.

Called by `__main__` and by executors that must notice a cancel which a library swallowed. It knows no task.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Cancelled(BaseException):
    """The task was cancelled. No `except Exception` of a library catches it."""


class _State:
    requested = False


def _on_signal(number: int, frame: FrameType | None) -> None:
    _State.requested = True
    raise Cancelled


def install() -> None:
    """From now on a signal raises Cancelled in the main thread, wherever it is."""
    for number in _SIGNALS:
        signal.signal(number, _on_signal)


def ignore() -> None:
    """From now on signals do nothing: what is being written is written whole."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raise Cancelled if a signal came, for loops inside libraries that swallow exceptions."""
    if _State.requested:
        raise Cancelled
