"""The counts of tasks and attempts that the Lua steps keep in `gpuflow.metrics` (broker/lua/common.lua). Pure.

A field is `<name>\\n<label>\\n<task type>`, for some with `\\n<queue>`; its value is a whole number that only grows:

| name | label | counts |
|---|---|---|
| `submitted` | | tasks, by type and queue; one that was queued again by hand counts again |
| `ended` | final state | tasks, by type and queue |
| `started` | | attempts |
| `attempts` | outcome | attempts that have ended |
| `wait_bucket`, `run_bucket` | upper bound | how long tasks waited for an attempt, and attempts that succeeded took |
| `wait_ms`, `run_ms` | | the sums of these, in milliseconds |
| `gpu_ms`, `energy_mj`, `cost_millionths`, `artifact_bytes` | | what attempts have used |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

#: Upper bounds of the buckets of durations, in seconds, as in broker/lua/common.lua.
SECONDS_BOUNDS: Final = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14_400, 86_400)
#: The bounds as Lua writes them.
BUCKETS: Final = (*(f"{bound:g}" for bound in SECONDS_BOUNDS), "+Inf")


@dataclass(frozen=True, kw_only=True)
class Count:
    """One count: its name, the label that the step gave, the task type and the queue ("" where it has none)."""

    name: str
    label: str
    task_type: str
    queue: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Durations:
    """A histogram: cumulative counts by the bounds of BUCKETS, and the sum in seconds."""

    buckets: tuple[int, ...]
    sum_seconds: float


def parse(fields: Mapping[str, str]) -> Iterator[Count]:
    """Read the hash; what has another form (of a newer version, say) is passed over."""
    for field, value in fields.items():
        parts = field.split("\n")
        if len(parts) in (3, 4) and value.isdecimal():
            name, label, task_type = parts[:3]
            yield Count(name=name, label=label, task_type=task_type, queue="".join(parts[3:]), value=int(value))


def durations(counts: Mapping[tuple[str, str], int], sum_ms: int) -> Durations:
    """Return the histogram of one task type: `counts` are those of `("", bound)`, each of its own bucket."""
    cumulative, total = [], 0
    for bound in BUCKETS:
        total += counts.get(("", bound), 0)
        cumulative.append(total)
    return Durations(buckets=tuple(cumulative), sum_seconds=sum_ms / 1000)
