"""Puts the results of a stage's tasks together, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuflow.errors import ResultGone
from gpuflow.ledger.records import TaskRecord


def all_found(stage: str, tasks: Sequence[TaskRecord | None]) -> list[TaskRecord]:
    """Return the records of a stage's tasks. Raises ResultGone where one is missing: its rows would be, too."""
    found = [task for task in tasks if task is not None]
    if len(found) < len(tasks):
        raise ResultGone(
            f"stage {stage!r}: the records of {len(tasks) - len(found)} of its {len(tasks)} tasks are gone from Redis, "
            f"and their results with them; submit the pipeline again"
        )
    return found


def stage_result(results: Sequence[Mapping[str, Any]], load: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the result of a stage from those of its tasks, in the order of its shards or matrix.

    One task: its own result. Several: `results` holds each, `items` all their items in order (numbered anew), and
    `usage` the sums. `load` gives what a reference stands for and any other value as it is; raises what it raises.
    """
    if len(results) == 1:
        return dict(results[0])
    joined: dict[str, Any] = {"results": [dict(result) for result in results]}
    several = [load(result.get("items")) for result in results]
    if all(isinstance(items, list) for items in several):
        joined["items"] = [
            {**item, "index": index} if isinstance(item, Mapping) else item
            for index, item in enumerate(item for items in several for item in items)
        ]
    usages = [result["usage"] for result in results if isinstance(result.get("usage"), Mapping)]
    if usages:
        names = sorted({name for usage in usages for name in usage})
        joined["usage"] = {name: sum(usage.get(name, 0) for usage in usages) for name in names}
    return joined
