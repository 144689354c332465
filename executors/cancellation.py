"""Turns signals into exceptions in the main thread of a child: cancels into `Cancelled`, a notice into `Preempted`.

SIGTERM and SIGINT cancel. SIGUSR1 is a notice: this attempt is to end soon, so that the task goes on elsewhere. It
raises at once too, except within `notice_held`, where an executor saves its work first. Called by `__main__`, by
executors that can save, and by those that must notice a cancel which a library swallowed. It knows no task.

A signal that comes just before the main thread blocks in a system call would be seen when that call ends: hours later,
perhaps. So a thread learns of each signal, too, and sends it again until the main thread has seen it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

from gpuflow.protocol import PREEMPTED

_CANCEL: Final = (signal.SIGTERM, signal.SIGINT)
_NOTICE: Final = signal.SIGUSR1
T = TypeVar("T")

#: A signal that the main thread has not seen is sent to it again after this many seconds.
_AGAIN_SECONDS: Final = 0.2


class Cancelled(BaseException):
    """The task was cancelled. No `except Exception` of a library catches it."""

    def record(self) -> dict[str, Any] | None:
        """Return the error of the finish event; a plain cancel has none."""
        return None


class Preempted(Cancelled):
    """The attempt ends after a notice; the message says what of its work is saved."""

    def __init__(self, message: str = "the worker gave notice; nothing was saved") -> None:
        super().__init__(message)

    def record(self) -> dict[str, Any]:
        """Return the error of the finish event: another attempt goes on."""
        return {"type": PREEMPTED, "message": str(self), "retryable": True}


class _State:
    raised: type[Cancelled] | None = None
    noticed = False
    held = False
    seen = threading.Event()


def _on_cancel(number: int, frame: FrameType | None) -> None:
    _State.seen.set()
    _raise_once(Cancelled)


def _on_notice(number: int, frame: FrameType | None) -> None:
    _State.seen.set()
    again, _State.noticed = _State.noticed, True
    if not _State.held and not again:
        _raise_once(Preempted)


def _raise_once(kind: type[Cancelled]) -> None:
    """Raise the first time alone: a second signal must not disturb the end that the first one began."""
    if _State.raised is None:
        _State.raised = kind
        raise kind


def install() -> None:
    """From now on a signal raises Cancelled or Preempted in the main thread, wherever it is."""
    for number in _CANCEL:
        signal.signal(number, _on_cancel)
    signal.signal(_NOTICE, _on_notice)
    told, teller = os.pipe()
    os.set_blocking(teller, False)
    signal.set_wakeup_fd(teller, warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(told,), name="gpuflow-signals", daemon=True).start()


def _insist(told: int) -> None:
    """Send each signal that is told of to the main thread again until a handler of ours has run."""
    main = threading.main_thread().ident
    handlers = (_on_cancel, _on_notice)
    while numbers := os.read(told, 64):
        for number in numbers:
            while signal.getsignal(number) in handlers and not _State.seen.wait(_AGAIN_SECONDS):
                signal.pthread_kill(main or 0, number)
        _State.seen.clear()


def ignore() -> None:
    """From now on signals do nothing: what is being written is written whole."""
    for number in (*_CANCEL, _NOTICE):
        signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raise again what a signal raised, for loops inside libraries that swallow exceptions."""
    if _State.raised is not None:
        raise _State.raised


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, and raise what a signal raised in whichever callback it came.

    asyncio keeps an exception for itself that is raised in a callback, or in another task than this one: the loop goes
    on then, and waits for what may come no more.
    """
    import asyncio  # most children need none of it

    async def watched() -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=_AGAIN_SECONDS)
            check()
        return task.result()

    return asyncio.run(watched())


@contextmanager
def notice_held() -> Iterator[None]:
    """Within, a notice raises nothing: who holds it asks `noticed` where it can save its work, and ends then."""
    check()
    _State.held = True
    try:
        yield
    finally:
        _State.held = False


def preempt(message: str) -> NoReturn:
    """End the attempt after a notice; the message says what is saved. No signal disturbs this end any more."""
    ignore()
    raise Preempted(message)


def noticed() -> bool:
    """Say whether a notice came."""
    return _State.noticed
