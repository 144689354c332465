"""Fanning one spec out into several by a matrix of values. Pure."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping
from typing import Any, Final

from gpuflow.spec.report import Path, path_text

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
            raise ValueError(f"{path_text(steps)!r} leads nowhere: there is no {here!r}")
    last = steps[-1]
    in_mapping = isinstance(at, dict) and isinstance(last, str)
    in_list = isinstance(at, list) and isinstance(last, int) and last < len(at)
    if not in_mapping and not in_list:
        raise ValueError(f"{path_text(steps)!r} leads nowhere: there is no {last!r}")
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
