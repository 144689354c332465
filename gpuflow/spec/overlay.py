"""Deep merge of a stage's spec over the base spec, and where each merged value was written.

Used by `stages` alone. Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from gpuflow.spec.report import Path
from gpuflow.spec.sections import LEFT_OUT, PARTS_USED_BY, is_part_used, is_used

#: Mappings whose `type` says which other fields make sense: with another type, the base's fields are not merged in.
TYPED: Final[frozenset[Path]] = frozenset(
    {
        ("data",),
        ("model", "source"),
        ("checkpoint", "load"),
        ("search", "documents"),
        ("output", "destination"),
        ("reward_model",),
    }
)


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any], path: Path = ()) -> dict[str, Any]:
    """Return `over` laid on `base`: mappings merge key by key, everything else is replaced. Neither is changed.

    A mapping of TYPED that names another `type` than the base's replaces it whole.
    """
    merged = {key: copy.deepcopy(value) for key, value in base.items() if key not in over}
    for key, value in over.items():
        here, below = (*path, key), base.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and not _retyped(below, value, here):
            merged[key] = deep_merge(below, value, here)
        else:
            merged[key] = copy.deepcopy(value)
    # Keys stand in the order of the base, so that equal specs read alike.
    return {key: merged[key] for key in [*base, *(key for key in over if key not in base)]}


def _retyped(below: Mapping[str, Any], over: Mapping[str, Any], path: Path) -> bool:
    return path in TYPED and "type" in over and over["type"] != below.get("type")


def stage_spec(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a stage. A section of the base, or a part of one, that its task type does not use, and it does
    not name, is left out.
    """
    merged = deep_merge(base, own)
    task_type = merged.get("taskType")
    unused = [
        section
        for section in LEFT_OUT
        if section in merged and section not in own and isinstance(task_type, str) and not is_used(section, task_type)
    ]
    kept = {key: value for key, value in merged.items() if key not in unused}
    for section, field in PARTS_USED_BY:
        given, named = kept.get(section), own.get(section)
        is_own = isinstance(named, Mapping) and field in named
        if isinstance(given, Mapping) and not is_own and not is_part_used(section, field, str(task_type)):
            kept[section] = {name: value for name, value in given.items() if name != field}
    return kept


def has_path(value: Any, path: Path) -> bool:
    """Say whether `path` leads to something in `value`."""
    for part in path:
        if isinstance(value, Mapping) and part in value:
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return False
    return True


def written_at(path: Path, own: Mapping[str, Any], own_at: Path, base: Mapping[str, Any], base_at: Path) -> Path:
    """Return where the user wrote the value at `path` of a merged spec: in the stage, or in the base.

    What is in neither (a missing field) belongs to the one that holds more of the path; the stage, when equal.
    """
    for length in range(len(path), 0, -1):
        if has_path(own, path[:length]):
            return (*own_at, *path)
        if has_path(base, path[:length]):
            return (*base_at, *path)
    return (*own_at, *path)
