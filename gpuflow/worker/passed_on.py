"""Tasks whose messages this worker hands back, again and again: said once of each.

A message that is for newer or for other workers comes back every second until one of them takes it. Celery writes each
time that it was received, and that it is ignored.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

#: Of the tasks that are remembered, the ones that were handed back last.
_MOST: Final = 1000
#: What writes that a message was received, and that a task was ignored.
_CELERYS: Final = ("celery.worker.strategy", "celery.app.trace")


class PassedOn(logging.Filter):
    """What was handed back. As a filter it leaves out what Celery says of such a task from the second time on."""

    def __init__(self) -> None:
        super().__init__()
        self._causes: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def install(self) -> None:
        """Filter Celery's lines."""
        for name in _CELERYS:
            logging.getLogger(name).addFilter(self)

    def note(self, task_id: str, why: str) -> bool:
        """Note that a task was handed back; return whether that is news."""
        with self._lock:
            is_news = self._causes.get(task_id) != why
            self._causes[task_id] = why
            self._causes.move_to_end(task_id)
            if len(self._causes) > _MOST:
                self._causes.popitem(last=False)
        return is_news

    def forget(self, task_id: str) -> None:
        """Note that this worker runs the task."""
        with self._lock:
            self._causes.pop(task_id, None)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is to be written."""
        about = record.args
        return not (record.levelno <= logging.INFO and isinstance(about, Mapping) and about.get("id") in self._causes)


passed_on: Final = PassedOn()
