"""Checks the matrix of a stage: its paths, its values one by one, and how many tasks it makes. Used by `stages`."""

from __future__ import annotations

import math
from typing import Any, Final

from gpuflow.spec.checking import check_spec
from gpuflow.spec.function_section import FIXED
from gpuflow.spec.matrix import MAX_TASKS, parse_path, set_path
from gpuflow.spec.report import Findings, Path, show
from gpuflow.spec.sections import INFERENCE, LORA, TRAINING_SCHEMAS, training_section

#: Most values that are checked at submit; the rest is checked at dispatch, as all are.
_MAX_CHECKED: Final = 200


def check_matrix(
    merged: dict[str, Any], matrix: dict[str, Any], inside: Findings, at_matrix: Findings, *, foreign: bool
) -> tuple[dict[str, Any], dict[str, list[Any]] | None]:
    """Return the canonical spec with the first value of every path, and the matrix with canonical paths.

    `inside` takes mistakes of the spec, `at_matrix` those of the matrix (paths begin with its key).
    """
    if isinstance(merged.get("function"), str):  # its short form: a path leads into the long one
        merged = {**merged, "function": {"name": merged["function"]}}
    axes = _axes(merged, matrix, at_matrix)
    if not axes:
        return merged, None
    tasks = math.prod(len(values) for _, values in axes.values())
    if tasks > MAX_TASKS:
        at_matrix.add((), f"makes {tasks} tasks; the limit is {MAX_TASKS}")
        return merged, None
    first = {key: values[0] for key, (_, values) in axes.items()}
    spec = check_spec(_variant(merged, axes, first, at_matrix), _mapped(inside, at_matrix, axes, {}), foreign=foreign)
    checked = 0
    for key, (_, values) in axes.items():
        for index, value in enumerate(values[1:], start=1):
            checked += 1
            if checked > _MAX_CHECKED:
                break
            chosen = {**first, key: value}
            variant = _variant(merged, axes, chosen, at_matrix)
            check_spec(variant, _mapped(inside, at_matrix, axes, {key: index}), foreign=foreign)
    canonical_axes: dict[str, list[Any]] = {}
    for key, (path, values) in axes.items():
        name = _canonical_path(path, merged.get("taskType"))
        if name in canonical_axes:
            at_matrix.add((key,), f"varies {name}, which another path varies too; keep one")
        canonical_axes[name] = values
    return spec, canonical_axes


def _axes(merged: dict[str, Any], matrix: dict[str, Any], findings: Findings) -> dict[str, tuple[Path, list[Any]]]:
    axes: dict[str, tuple[Path, list[Any]]] = {}
    if not matrix:
        findings.add((), "is empty; give paths with lists of values, as in training.learning_rate: [1e-4, 1e-3]")
    for key, values in matrix.items():
        try:
            path = parse_path(key)
            set_path(merged, path, None)
        except ValueError as error:
            findings.add((key,), str(error))
            continue
        if not isinstance(values, list) or not values:
            findings.add((key,), f"is {show(values)}; it must be a list with at least one value")
        elif path[0] == "taskType":
            findings.add((key,), "a stage has one task type; make two stages")
        elif path in FIXED:
            findings.add((key,), "a stage calls one function; vary function.args[0] or function.kwargs.NAME")
        elif beside := next((one for one, (other, _) in axes.items() if _overlap(path, other)), None):
            findings.add((key,), f"and {beside!r} vary the same field, and one would replace the other; keep one")
        else:
            axes[key] = (path, values)
    return axes if len(axes) == len(matrix) else {}


def _overlap(path: Path, other: Path) -> bool:
    """Say whether one of two different paths leads into what the other replaces."""
    shorter = min(len(path), len(other))
    return len(path) != len(other) and path[:shorter] == other[:shorter]


def _variant(
    merged: dict[str, Any], axes: dict[str, tuple[Path, list[Any]]], chosen: dict[str, Any], findings: Findings
) -> dict[str, Any]:
    spec = merged
    for key, (path, _) in axes.items():
        try:
            spec = set_path(spec, path, chosen[key])
        except ValueError as error:
            findings.add((key,), str(error))
    return spec


def _mapped(
    inside: Findings, at_matrix: Findings, axes: dict[str, tuple[Path, list[Any]]], index: dict[str, int]
) -> Findings:
    """Return findings that place a mistake of a varied value at its entry of the matrix."""

    def locate(path: Path) -> Path:
        for key, (varied, _) in axes.items():
            if path[: len(varied)] == varied:
                return at_matrix.locate((key, index.get(key, 0), *path[len(varied) :]))
        return inside.locate(path)

    return inside.within(locate)


def _canonical_path(path: Path, task_type: Any) -> str:
    """Return the path with a library's own name where an alias stands, as the canonical spec has it."""
    sections = {"lora": LORA, "inference": INFERENCE}
    if isinstance(task_type, str) and task_type in TRAINING_SCHEMAS:
        sections["training"] = training_section(task_type)
    steps = list(path)
    if len(steps) > 1 and steps[0] in sections:
        steps[1] = sections[str(steps[0])].aliases.get(str(steps[1]), steps[1])
    return "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps).removeprefix(".")
