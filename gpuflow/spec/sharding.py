"""Splits the rows of one task over several: how many shards a spec asks for, and which rows each of them has. Pure.

A shard is the task's spec with `data.shard`: `{index, count}`, and `start`, `end`, `total` where the number of rows is
known at dispatch; then `data` holds those rows alone. Otherwise the child reads all rows and takes its range of them,
so every shard must see the same rows in the same order (`pipelines.collect` compares what they saw).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gpuflow.protocol import is_user_type
from gpuflow.spec.artifact_reference import is_reference, read_reference
from gpuflow.spec.function_section import is_function, rows_of, with_rows
from gpuflow.spec.report import Findings

#: Task types of gpuflow whose rows do not depend on each other: each row gives one item of the result.
ROW_TYPES: Final = frozenset({"echo", "inference", "embedding", "rag"})
_NO_ROWS: Final = frozenset({"command", "container"})
#: Seed of a shuffle that names none.
DEFAULT_SEED: Final = 0


def shard_range(total: int, index: int, count: int) -> tuple[int, int]:
    """Return (start, end) of a shard: contiguous, in order, sizes within one; empty where `total` is below `count`.

    The ranges of all `count` shards tile 0..total exactly. Raises ValueError for a shard that does not exist.
    """
    if total < 0 or not 0 <= index < count:
        raise ValueError(f"there is no shard {index} of {count} over {total} rows")
    size, larger = divmod(total, count)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


def shard_count(spec: Mapping[str, Any]) -> int:
    """Return over how many tasks a canonical spec splits its data at most; 1 where it does not."""
    parallel = _mapping(spec.get("parallel"))
    if parallel.get("enabled") is False:
        return 1
    most, replicas = parallel.get("max_shards"), _mapping(spec.get("resources")).get("replicas")
    return next((number for number in (most, replicas) if isinstance(number, int)), 1)


def shard(spec: Mapping[str, Any], count: int | None = None) -> list[dict[str, Any]]:
    """Return the specs of the shards, in order; `count` stands in for what the spec asks for.

    Inline rows and references are cut here, into at most as many parts as there are rows. Rows of files, data sets and
    presets are cut by the child: exactly `count` shards, of which some may be empty. One shard is the spec itself,
    without `parallel`. Raises ValueError for fewer than one shard.
    """
    count = shard_count(spec) if count is None else count
    if count < 1:
        raise ValueError(f"max_shards is {count}; give at least 1")
    whole = {key: copy.deepcopy(value) for key, value in spec.items() if key not in ("data", "parallel")}
    if "replicas" in _mapping(whole.get("resources")):
        del whole["resources"]["replicas"]
    data = spec.get("data")
    rows = rows_of(spec) if is_function(spec) else None
    if rows is not None and count > 1:
        return [with_rows(whole, rows[start:end]) for start, end in _ranges(len(rows), count)]
    if not isinstance(data, Mapping):
        return [whole]
    if count == 1:
        return [{**whole, "data": copy.deepcopy(dict(data))}]
    return [{**copy.deepcopy(whole), "data": part} for part in _parts(data, count)]


def _parts(data: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    field = next((name for name in ("items", "prompts") if data.get(name) is not None), "")
    rows = data.get(field)
    if isinstance(rows, list):
        return _inline_parts(data, field, count)
    if field and is_reference(rows) and not data.get("shuffle"):
        reference = read_reference(rows)
        if reference.count:
            first, last = reference.slice or (0, reference.count)
            last = max(first, min(last, reference.count, first + (data.get("max_items") or reference.count)))
            slices = [
                replace(reference, slice=(first + start, first + end)).to_dict()
                for start, end in _ranges(last - first, count)
            ]
            return _known(data, field, slices, last - first)
    seed = {"seed": data.get("seed", DEFAULT_SEED)} if data.get("shuffle") else {}
    return [{**copy.deepcopy(dict(data)), **seed, "shard": {"index": index, "count": count}} for index in range(count)]


def _inline_parts(data: Mapping[str, Any], field: str, count: int) -> list[dict[str, Any]]:
    rows = list(data[field])
    if data.get("shuffle"):
        random.Random(data.get("seed") or DEFAULT_SEED).shuffle(rows)  # noqa: S311  (as the child would)
    rows = rows[: data["max_items"]] if data.get("max_items") else rows
    return _known(data, field, [rows[start:end] for start, end in _ranges(len(rows), count)], len(rows))


def _ranges(total: int, count: int) -> list[tuple[int, int]]:
    count = max(1, min(count, total))
    return [shard_range(total, index, count) for index in range(count)]


def _known(data: Mapping[str, Any], field: str, cut: Sequence[Any], total: int) -> list[dict[str, Any]]:
    rest = {key: value for key, value in data.items() if key not in ("shuffle", "seed", "max_items", field)}
    if len(cut) == 1:
        return [{**copy.deepcopy(rest), field: copy.deepcopy(cut[0])}]
    parts = []
    for index, rows in enumerate(cut):
        start, end = shard_range(total, index, len(cut))
        known = {"index": index, "count": len(cut), "start": start, "end": end, "total": total}
        parts.append({**copy.deepcopy(rest), field: copy.deepcopy(rows), "shard": known})
    return parts


def check_parallel(spec: Mapping[str, Any], findings: Findings, *, at_dispatch: bool) -> None:
    """Note what is wrong with `parallel`, `resources.replicas` and `data.shard` of a checked spec."""
    parallel, data = _mapping(spec.get("parallel")), _mapping(spec.get("data"))
    most, replicas = parallel.get("max_shards"), _mapping(spec.get("resources")).get("replicas")
    several = isinstance(replicas, int) and replicas > 1
    count = shard_count(spec)
    if parallel.get("enabled") is True and most is None and not several:
        findings.add(
            ("parallel", "max_shards"), "is missing: one task runs; give the number of tasks that share the data"
        )
    if several and parallel.get("enabled") is False:
        findings.add(
            ("resources", "replicas"),
            f"is {replicas}, but parallel.enabled is false; replicas share the data; keep one",
        )
    elif several and isinstance(most, int) and most != replicas:
        findings.add(
            ("resources", "replicas"), f"is {replicas}, but parallel.max_shards is {most}, which counts; keep one"
        )
    if count > 1 and _mapping(spec.get("postprocess")).get("jsonl_export") is not None:
        findings.add(
            ("postprocess", "jsonl_export"),
            "makes one file of all rows, which several tasks share; leave parallel and replicas out, or the file",
        )
    if "shard" in data and not at_dispatch:
        findings.add(("data", "shard"), "is set by gpuflow; give parallel, which splits the data")
    elif count > 1:
        path = ("parallel",) if isinstance(most, int) else ("resources", "replicas")
        if not _check_type(spec, path, findings):
            return
        if is_function(spec):
            if _mapping(spec.get("function")).get("rows") is None:
                findings.add(path, "splits a list among the arguments; say which: function.rows: NAME")
        elif "shard" in data:
            findings.add(("data", "shard"), f"is one part of the data, but {'.'.join(path)} splits it; keep one")
        elif not data:
            findings.add(path, "splits the rows of data, and the task has no data; give data, or leave it out")
    elif "shard" in data:
        _check_type(spec, ("data", "shard"), findings)


def _check_type(spec: Mapping[str, Any], path: tuple[str, ...], findings: Findings) -> bool:
    task_type = str(spec.get("taskType"))
    if task_type in ROW_TYPES or is_user_type(task_type) or is_function(spec):
        return True
    if task_type in _NO_ROWS:
        why = "does not read rows of data; for several runs give the stage a matrix"
    else:
        why = "trains one model on all rows, which cannot be split; for more GPUs ask for them in resources"
    findings.add(path, f"splits the data over several tasks, but taskType {task_type} {why}")
    return False


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
