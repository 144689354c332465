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
| `calls` | outcome | calls of `/v1` that have ended; in place of the task type they have the model |
| `first_bucket`, `first_ms` | upper bound | how long the first text of streamed calls took, by model |
| `refused` | reason | messages whose signature was refused; in place of the task type they have the mode |
| `gpu_ms`, `energy_mj`, `cost_millionths`, `artifact_bytes` | | what attempts have used |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

#: Upper bounds of the buckets of durations, in seconds, as in broker/lua/common.lua.
SECONDS_BOUNDS: Final = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14_400, 86_400)
#: Those of the time to the first text, as in serving/lua/count_call.lua.
FIRST_TOKEN_BOUNDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
#: The bounds as Lua writes them.
BUCKETS: Final = (*(f"{bound:g}" for bound in SECONDS_BOUNDS), "+Inf")
FIRST_TOKEN_BUCKETS: Final = (*(f"{bound:g}" for bound in FIRST_TOKEN_BOUNDS), "+Inf")


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
    """A histogram: cumulative counts by its bounds, and the sum in seconds."""

    buckets: tuple[int, ...]
    sum_seconds: float


def parse(fields: Mapping[str, str]) -> Iterator[Count]:
    """Read the hash; what has another form (of a newer version, say) is passed over."""
    for field, value in fields.items():
        parts = field.split("\n")
        if len(parts) in (3, 4) and value.isdecimal():
            name, label, task_type = parts[:3]
            yield Count(name=name, label=label, task_type=task_type, queue="".join(parts[3:]), value=int(value))


def durations(counts: Mapping[tuple[str, str], int], sum_ms: int, bounds: tuple[str, ...] = BUCKETS) -> Durations:
    """Return the histogram of one task type: `counts` are those of `("", bound)`, each of its own bucket."""
    cumulative, total = [], 0
    for bound in bounds:
        total += counts.get(("", bound), 0)
        cumulative.append(total)
    return Durations(buckets=tuple(cumulative), sum_seconds=sum_ms / 1000)
