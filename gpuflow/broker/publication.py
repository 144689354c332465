"""A publish that is held back: what the transport would have sent, for a step of the ledger that sends it itself.

So a task that is called again is put back by the same step that ends its attempt (`lua/yield.lua`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Publication:
    """One message, signed where messages are: its queue and list, and what is registered and stamped with it."""

    message: str
    tag: str
    queue: str
    list_key: str
    delay_seconds: float = 0
    requirement: str = ""
    hints: str = ""

    def arguments(self) -> tuple[str, ...]:
        """Return it as YIELD takes it."""
        return self.message, self.list_key, self.tag, self.queue, self.requirement, self.hints


#: What YIELD is told where the message that comes back is the one that was taken.
THE_SAME: Final = ("",) * len(Publication(message="", tag="", queue="", list_key="").arguments())

_here = threading.local()


def held_here(task_id: object) -> list[Publication] | None:
    """Return where the message of a task goes that this thread publishes; None: to the broker."""
    held: list[Publication] | None = getattr(_here, "held", None)
    return held if held is not None and task_id == _here.task_id else None


@contextmanager
def holding(task_id: str) -> Iterator[list[Publication]]:
    """Hold back what this thread publishes of one task in this block, and give it as a list."""
    held: list[Publication] = []
    _here.held, _here.task_id = held, task_id
    try:
        yield held
    finally:
        _here.held = None
