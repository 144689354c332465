"""Does something again and again in a thread, as long as a block lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(action: Callable[[], bool], every_seconds: float, name: str) -> Iterator[None]:
    """Call `action` every so many seconds in a thread of this name, until it returns False or the block ends.

    The thread is over when the block is left. What `action` raises ends the thread.
    """
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_seconds) and action():
            pass

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
