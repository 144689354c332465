"""Turns the spec of a stage into the specs of its tasks: references, graph templates, matrix, shards. Pure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from gpuflow.errors import GPUFlowError
from gpuflow.spec import canonical, expand_matrix, pick, resolve, shard
from gpuflow.spec.references import Reference, parse_reference
from gpuflow.spec.template import Stage

StageResult = Callable[[str], Mapping[str, Any]]


def task_specs(stage: Stage, result_of: StageResult) -> list[dict[str, Any]]:
    """Return the canonical spec of each task of a stage, in order: matrix points first, then shards of each.

    `result_of` gives the result of an upstream stage. Raises GPUFlowError (UnresolvedReference, InvalidTemplate) with
    the path that has no value or does not fit.
    """

    def lookup(reference: Reference) -> Any:
        return pick(result_of(reference.stage), reference)

    found: list[dict[str, Any]] = []
    for point in expand_matrix(stage.spec, stage.matrix or {}):
        spec = resolve(_graph_items(point, result_of), lookup)
        parallel = spec.get("parallel") or {}
        shards = shard(spec, int(parallel.get("max_shards", 1))) if parallel.get("enabled") else [spec]
        found += [canonical(part) for part in shards]
    return found


def _graph_items(spec: Mapping[str, Any], result_of: StageResult) -> dict[str, Any]:
    """Replace `data: {type: graph_template}` by a list: one text a row, made of the columns of upstream results.

    A column is a list (a row each) or one value (the same in every row); its line in the text is `label: value`.
    """
    data = spec.get("data")
    resolved = copy.deepcopy(dict(spec))
    if not isinstance(data, Mapping) or data.get("type") != "graph_template":
        return resolved
    columns = (data.get("template") or {}).get("columns") or []
    labels = [str(column.get("label") or column.get("node")) for column in columns]
    values = [_column(column, result_of) for column in columns]
    lengths = {len(value) for value in values if isinstance(value, list)}
    if len(lengths) > 1:
        sizes = ", ".join(
            f"{label}: {len(value)}"
            for label, value in zip(labels, values, strict=True)
            if isinstance(value, list)
        )
        raise GPUFlowError(
            f"the columns of data.template have different numbers of rows ({sizes}); make them equal"
        )
    rows = lengths.pop() if lengths else 1
    spread = [value if isinstance(value, list) else [value] * rows for value in values]
    resolved["data"] = {"type": "list", "items": [_row(labels, row) for row in zip_longest(*spread)]}
    return resolved


def _row(labels: Sequence[str], row: Sequence[Any]) -> str:
    return "\n".join(f"{label}: {value}" for label, value in zip(labels, row, strict=True))


def _column(column: Mapping[str, Any], result_of: StageResult) -> Any:
    node, path = column.get("node"), column.get("path") or "items"
    if not node:
        return column.get("value", "")
    text = str(path).removeprefix("result.")
    value = pick(result_of(str(node)), parse_reference(f"{node}.{text}"))
    if isinstance(value, list):
        return [item.get("output", item) if isinstance(item, Mapping) else item for item in value]
    return value
