"""What waits in each queue, in one step at one moment. Read-only.

For all who show it or count on it: `gpuflow queues`, the monitor, the metrics, scaling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuflow.broker.keys import Keys
from gpuflow.broker.priorities import HIGHEST_PRIORITY, SEPARATOR
from gpuflow.broker.scripts import load_script


@dataclass(frozen=True, kw_only=True)
class QueueDepth:
    """What waits in one queue: `waiting` is priority -> messages.

    `requirement` is the stored requirement as JSON, '' for a plain queue and for one that only its name tells of;
    `oldest_seconds` how long the oldest message has waited, None: nothing waits, or its message does not say;
    `task_seconds` what its tasks took, on average, None: not known.
    """

    name: str
    requirement: str
    waiting: Mapping[int, int]
    oldest_seconds: float | None
    task_seconds: float | None

    @property
    def depth(self) -> int:
        """How many messages wait, of all priorities."""
        return sum(self.waiting.values())


@dataclass(frozen=True, kw_only=True)
class Depths:
    """What waits at `now` (Unix seconds on the server's clock); `gathering`: leases come back after its restart."""

    now: float
    gathering: bool
    queues: tuple[QueueDepth, ...]


def read_depths(client: Any, keys: Keys, also: Iterable[str]) -> Depths:
    """Return every demand queue in which something waits, and those named in `also`. Raises redis errors."""
    time_text, gathering, *rows = load_script("gpuflow.broker", "depths")(
        client, [], [keys.prefix, keys.ready, keys.sweep, SEPARATOR, *sorted(set(also))]
    )
    now = float(time_text)
    return Depths(now=now, gathering=bool(int(gathering)), queues=tuple(_queue(row, now) for row in rows))


def _queue(row: list[str], now: float) -> QueueDepth:
    name, requirement, took, oldest, *depths = row
    return QueueDepth(
        name=name,
        requirement=requirement,
        waiting={HIGHEST_PRIORITY - place: int(depth) for place, depth in enumerate(depths) if int(depth)},
        oldest_seconds=max(0.0, now - float(oldest)) if oldest else None,
        task_seconds=float(took) if took else None,
    )
