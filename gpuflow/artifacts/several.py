"""Does the same for several files at once: few threads, the first failure stops all, results in the order of the files.

Called by whoever stores, fetches or digests the files of one folder. It knows neither stores nor disks; how much memory
and how many connections one file takes, its store says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from gpuflow.artifacts.store import Progress

T = TypeVar("T")
R = TypeVar("R")

#: Files that go over at once. A local one takes a core for its digest, one over a network a connection.
MOST_AT_ONCE: Final = 4


class _Stopped(Exception):
    """Another file has failed, so this one is no longer wanted."""


def several(work: Callable[[T, Progress], R], items: Sequence[T], *, progress: Progress | None = None) -> list[R]:
    """Call `work(item, progress)` for all items, MOST_AT_ONCE at a time, and return what it returned, in their order.

    Returns and raises when no work goes on any more. What the first one that fails raises is raised; the others begin
    no item then, and the progress that `work` is given stops those under way at their next byte. `progress` is called
    by one thread at a time; what it raises stops all as well. The threads do not keep the process from ending.
    """
    run = _Run(work, items, progress)
    count = min(MOST_AT_ONCE, len(items))
    if count <= 1:
        run.go_on()
    else:
        threads = [
            threading.Thread(target=run.go_on, name=f"gpuflow-several-{number}", daemon=True) for number in range(count)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # an interrupt comes to the thread that waits
            run.stopping = True
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
    if run.failures:
        raise run.failures[0]
    return [run.done[number] for number in range(len(items))]


class _Run(Generic[T, R]):
    """The items under way, and what has become of the others."""

    def __init__(self, work: Callable[[T, Progress], R], items: Sequence[T], progress: Progress | None) -> None:
        self._work, self._items, self._progress = work, items, progress
        self._left = iter(range(len(items)))
        self._taking, self._telling = threading.Lock(), threading.Lock()
        self.stopping = False
        self.done: dict[int, R] = {}
        self.failures: list[BaseException] = []

    def go_on(self) -> None:
        """Do what is left, item by item; note a failure."""
        try:
            while (number := self._next()) is not None:
                self.done[number] = self._work(self._items[number], self._told)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (it is raised where the caller waits)
            with self._taking:
                self.failures.append(error)
                self.stopping = True

    def _next(self) -> int | None:
        with self._taking:
            return None if self.stopping else next(self._left, None)

    def _told(self, count: int) -> None:
        with self._telling:
            if self.stopping:
                raise _Stopped
            if self._progress is not None:
                try:
                    self._progress(count)
                except BaseException:
                    self.stopping = True  # before another thread tells
                    raise
