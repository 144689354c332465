"""How a priority 0..9 becomes a Redis list. Pure.

gpuflow serves 9 first and 0 last, and 5 when none is given. kombu names the list of priority step s `<queue>` for
s = 0 and `<queue>\\x06\\x16<s>` otherwise. We keep that layout, so that Flower and stock producers see the same
queues, and map: priority 5 is the bare list (what a stock producer writes when it gives no priority), priority 0 is
step 10, every other priority is the step of its own number.
"""

from __future__ import annotations

from typing import Final

#: kombu's separator between a queue name and its priority step.
SEPARATOR: Final = "\x06\x16"
DEFAULT_PRIORITY: Final = 5
HIGHEST_PRIORITY: Final = 9
#: Steps that kombu and Flower must know to see all lists (transport option `priority_steps`).
PRIORITY_STEPS: Final = (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)


def list_key(queue: str, priority: int | None) -> str:
    """Return the list (without global prefix) of `queue` for `priority`; out of range values are clamped."""
    level = DEFAULT_PRIORITY if priority is None else max(0, min(HIGHEST_PRIORITY, int(priority)))
    if level == DEFAULT_PRIORITY:
        return queue
    return f"{queue}{SEPARATOR}{level or 10}"


def list_keys(queues: list[str]) -> list[str]:
    """Return every list of `queues`, most urgent priority first, the queues of one priority in the given order."""
    return [list_key(queue, level) for level in range(HIGHEST_PRIORITY, -1, -1) for queue in queues]


def queue_of(key: str) -> str:
    """Return the queue that a list belongs to."""
    return key.split(SEPARATOR, 1)[0]


def priority_of(key: str) -> int:
    """Return the priority of the messages of a list."""
    step = key.partition(SEPARATOR)[2]
    return int(step) % 10 if step.isdecimal() else DEFAULT_PRIORITY
