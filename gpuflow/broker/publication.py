"""A publish that is held back: what the transport would have sent, for a step of the ledger that sends it itself.

So a task that is called again is put back by the same step that ends its attempt (`lua/yield.lua`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

#: Fields of a record that belong to the message: what it asks for, and which queues it moves on to.
_OF_QUEUES: Final = ("requirement", "alternatives", "fallback_seconds")


@dataclass(frozen=True, kw_only=True)
class Publication:
    """One message, signed where messages are: its queue and list, and what is registered and stamped with it.

    `fields` are those of its record.
    """

    message: str
    tag: str
    queue: str
    list_key: str
    delay_seconds: float = 0
    requirement: str = ""
    hints: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, *, replaces: bool = False) -> tuple[str, ...]:
        """Return it as YIELD takes it; `replaces`: it is of another function than the task was submitted with.

        With it goes what the record says of where the message may wait. The spec that was submitted stays there: by it
        a stage is put together, and a submit that is repeated is known.
        """
        told = {name: self.fields[name] for name in _OF_QUEUES if name in self.fields}
        if replaces and "spec" in self.fields:
            told["replacement"] = self.fields["spec"]
        return self.message, self.list_key, self.tag, self.queue, self.requirement, self.hints, json.dumps(told)


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
