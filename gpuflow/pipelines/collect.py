"""Puts the results of a stage's tasks together, in order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def stage_result(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of a stage from those of its tasks, in the order of its shards or matrix.

    One task: its own result. Several: `results` holds each, `items` all their items in order (numbered anew), and
    `usage` the sums.
    """
    if len(results) == 1:
        return dict(results[0])
    joined: dict[str, Any] = {"results": [dict(result) for result in results]}
    if all(isinstance(result.get("items"), list) for result in results):
        items = [item for result in results for item in result["items"]]
        joined["items"] = [
            {**item, "index": index} if isinstance(item, Mapping) else item for index, item in enumerate(items)
        ]
    usages = [result["usage"] for result in results if isinstance(result.get("usage"), Mapping)]
    if usages:
        names = sorted({name for usage in usages for name in usage})
        joined["usage"] = {name: sum(usage.get(name, 0) for usage in usages) for name in names}
    return joined
