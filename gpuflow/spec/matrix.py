"""Fanning one spec out into several: a matrix of values, and shards of its inputs. Pure."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping
from typing import Any, Final

from gpuflow.spec.report import Path

#: Most tasks that one matrix may make.
MAX_TASKS: Final = 1024
_STEP: Final = re.compile(r"(?:^|\.)([A-Za-z_][A-Za-z0-9_-]*)|\[(\d{1,6})\]")


def parse_path(text: str) -> Path:
    """Read `training.learning_rate` or `data.items[0]`. Raises ValueError with cause and mend."""
    steps = list(_STEP.finditer(text))
    if not steps or "".join(found[0] for found in steps) != text or text.startswith((".", "[")):
        raise ValueError(f"{text[:60]!r} is not a path; write as training.learning_rate or data.items[0]")
    return tuple(int(found[2]) if found[2] is not None else str(found[1]) for found in steps)


def set_path(spec: Mapping[str, Any], path: str | Path, value: Any) -> dict[str, Any]:
    """Return a copy of `spec` with `value` at `path`; mappings on the way are made. Raises ValueError."""
    steps = parse_path(path) if isinstance(path, str) else path
    done: Any = copy.deepcopy(dict(spec))
    at: Any = done
    for here, following in itertools.pairwise(steps):
        if isinstance(at, dict) and isinstance(here, str):
            if at.get(here) is None:
                at[here] = {} if isinstance(following, str) else []
            at = at[here]
        elif isinstance(at, list) and isinstance(here, int) and here < len(at):
            at = at[here]
        else:
            raise ValueError(f"{path!r} leads nowhere: there is no {here!r}")
    last = steps[-1]
    in_mapping = isinstance(at, dict) and isinstance(last, str)
    in_list = isinstance(at, list) and isinstance(last, int) and last < len(at)
    if not in_mapping and not in_list:
        raise ValueError(f"{path!r} leads nowhere: there is no {last!r}")
    at[last] = copy.deepcopy(value)
    result: dict[str, Any] = done
    return result


def expand_matrix(spec: Mapping[str, Any], matrix: Mapping[str, list[Any]] | None) -> list[dict[str, Any]]:
    """Return one spec for each combination of the values, the last path varying fastest; without a matrix, a copy."""
    if not matrix:
        return [copy.deepcopy(dict(spec))]
    expanded = []
    for values in itertools.product(*matrix.values()):
        variant = dict(spec)
        for path, value in zip(matrix, values, strict=True):
            variant = set_path(variant, path, value)
        expanded.append(variant)
    return expanded


def shard(spec: Mapping[str, Any], max_shards: int) -> list[dict[str, Any]]:
    """Split `data.items` or `data.prompts`, in order, into at most `max_shards` contiguous parts, sizes within one.

    Joined again in order, the parts are the whole. A spec whose inputs are not in it (a data set, a file), or are
    shuffled, comes back as the one part that it is. Raises ValueError for fewer than one shard.
    """
    if max_shards < 1:
        raise ValueError(f"max_shards is {max_shards}; give at least 1")
    whole = copy.deepcopy(dict(spec))
    data = whole.get("data")
    field = next(
        (name for name in ("items", "prompts") if isinstance(data, dict) and isinstance(data.get(name), list)), ""
    )
    if not isinstance(data, dict) or not field or data.get("shuffle"):
        return [whole]
    limit = data.pop("max_items", None)
    items = data[field][:limit]
    data[field] = items
    count = min(max_shards, len(items))
    if count <= 1:
        return [whole]
    size, larger = divmod(len(items), count)
    edges = [index * size + min(index, larger) for index in range(count + 1)]
    return [
        {**copy.deepcopy({k: v for k, v in whole.items() if k != "data"}), "data": {**data, field: items[start:end]}}
        for start, end in itertools.pairwise(edges)
    ]
