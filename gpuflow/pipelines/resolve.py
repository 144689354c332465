"""Turns a stage into the specs of its tasks: references, matrix, shards. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpuflow.spec import Stage, pick, shard
from gpuflow.spec.references import Reference

StageResult = Callable[[str], Mapping[str, Any]]


def task_specs(stage: Stage, result_of: StageResult) -> list[dict[str, Any]]:
    """Return the canonical spec of each task of a stage, in order: matrix points first, then shards of each.

    `result_of` gives the result of an upstream stage. Raises GPUFlowError (UnresolvedReference, InvalidTemplate) with
    the path that has no value or does not fit.
    """

    def lookup(reference: Reference) -> Any:
        return pick(result_of(reference.stage), reference)

    found: list[dict[str, Any]] = []
    for spec in stage.tasks(lookup):
        parallel = spec.get("parallel") or {}
        found += shard(spec, int(parallel.get("max_shards", 1))) if parallel.get("enabled") else [spec]
    return found
