"""The section `function`: which function of a team is called, with what, and which of its arguments is split. Pure.

A name is only looked up among the tasks that a worker was started with. It stands in the template itself: neither a
reference nor a matrix may choose it, so that whoever reads a template knows what it calls.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Final

from gpuflow.protocol import FUNCTION_TYPE
from gpuflow.spec.references import is_pending, resolve_env, walk_references
from gpuflow.spec.report import Findings, show

#: What the names of tasks begin with that are gpuflow's and Celery's own: no template calls those.
_OURS: Final = frozenset({"gpuflow", "celery", "tasks"})
_MAX_NAME: Final = 200
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_ARGUMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
#: Paths that no matrix varies: a stage has one function, and splits one argument.
FIXED: Final = (("function",), ("function", "name"), ("function", "rows"))
#: Section that functions have no use for -> what stands in its place.
INSTEAD: Final[Mapping[str, str]] = {
    "model": "name the model by an argument",
    "data": "give the data by an argument; function.rows splits a list",
    "output": "what the function returns is stored as it is, and files by gpuflow.context.artifact()",
    "env": "set it on the workers, whose environment a function has, or give it by an argument",
    "secrets": "set it on the workers: a function has their environment",
    "notify": "let a stage after it tell, or the function itself",
    "retry": "the function says what is tried again: self.retry() or autoretry_for",
    "merge": "each call of a function runs",
    "resultTtlSeconds": "each call of a function runs",
    "environment": "a function runs in the worker's own Python",
    "sloSeconds": "give priority, or timeout",
}


def name_problem(name: Any) -> str | None:
    """Return why a template cannot call a function by a name, or None."""
    if not isinstance(name, str) or len(name) > _MAX_NAME or _NAME.fullmatch(name) is None:
        return (
            f"is {show(name)}; write the name of a Celery task of yours, such as my_team.jobs.embed: words of letters, "
            f"digits and _ with dots between, at most {_MAX_NAME} characters, no reference; name= of the decorator "
            "gives a task another name"
        )
    if name.partition(".")[0] == "tasks":
        return (
            f"is {show(name)}, and names below `tasks.` are kept for gpuflow's own; give a task of yours another one "
            "by name= of the decorator, such as my_team.add"
        )
    if is_ours(name):
        return f"is {show(name)}, a task of gpuflow or Celery itself; a template calls functions of a team"
    return None


def is_ours(name: str) -> bool:
    """Say whether a task is one of gpuflow or Celery itself, by its name."""
    return name.partition(".")[0] in _OURS


def argument_problem(name: str) -> str | None:
    """Return why a named argument cannot have a name, or None."""
    if _ARGUMENT.fullmatch(name) is None or name == "self":
        return f"{show(name)} is no name of an argument; use letters, digits and _"
    return None


def check_function(spec: Mapping[str, Any], findings: Findings, *, at_dispatch: bool) -> None:
    """Note what the model of the section cannot see: references where none may be, and rows that are not there.

    `at_dispatch`: references to stages have their values, and what is split may be one part of it.
    """
    section = spec.get("function")
    if not isinstance(section, Mapping):
        return
    for name in ("name", "rows"):
        if is_pending(section.get(name)) or is_pending(section.get(name), at_dispatch=True):
            findings.add(("function", name), f"is {show(section[name])}; it must be written out, without a reference")
    for path, reference in walk_references({name: section.get(name) for name in ("args", "kwargs")}):
        if not isinstance(reference, ValueError) and reference.kind == "env":
            findings.add(
                ("function", *path), f"{reference}: a function has the worker's environment; read os.environ there"
            )
    if isinstance(section.get("rows"), int | str):
        _check_rows(spec, section, findings, at_dispatch=at_dispatch)


def _check_rows(spec: Mapping[str, Any], section: Mapping[str, Any], findings: Findings, *, at_dispatch: bool) -> None:
    rows, resources = section["rows"], spec.get("resources")
    replicas = resources.get("replicas") if isinstance(resources, Mapping) else None
    if spec.get("parallel") is None and replicas is None and not at_dispatch:
        findings.add(("function", "rows"), "splits nothing without parallel; give parallel.max_shards, or leave it out")
    holder = section.get("args" if isinstance(rows, int) else "kwargs")
    if is_pending(holder, at_dispatch=at_dispatch):
        return
    value = _argument(section, rows)
    if not _is_given(section, rows):
        findings.add(("function", "rows"), f"is {show(rows)}, which is none of the arguments that are given")
    elif not isinstance(value, list) and not is_pending(value, at_dispatch=at_dispatch):
        at = ("function", "args", rows) if isinstance(rows, int) else ("function", "kwargs", rows)
        findings.add(at, f"is {show(value)}; it is to be split over tasks, so it must be a list")


def _is_given(section: Mapping[str, Any], rows: Any) -> bool:
    """Say whether the argument that is split is there."""
    if isinstance(rows, int) and not isinstance(rows, bool):
        args = section.get("args")
        return isinstance(args, list) and 0 <= rows < len(args)
    kwargs = section.get("kwargs")
    return isinstance(kwargs, Mapping) and isinstance(rows, str) and rows in kwargs


def _argument(section: Mapping[str, Any], rows: Any) -> Any:
    """Return the argument that is split, None where it is not there."""
    return section["args" if isinstance(rows, int) else "kwargs"][rows] if _is_given(section, rows) else None


def is_function(spec: Mapping[str, Any]) -> bool:
    """Say whether a spec is of a team's function."""
    return spec.get("taskType") == FUNCTION_TYPE


def rows_of(spec: Mapping[str, Any]) -> list[Any] | None:
    """Return the list of a canonical spec of a function that is split over tasks; None where none is."""
    section = spec.get("function")
    value = _argument(section, section.get("rows")) if isinstance(section, Mapping) else None
    return value if isinstance(value, list) else None


def with_rows(spec: Mapping[str, Any], rows: list[Any]) -> dict[str, Any]:
    """Return the spec with other rows in the place of those that are split."""
    section = dict(spec["function"])
    if isinstance(section["rows"], int):
        section["args"] = [*section["args"]]
        section["args"][section["rows"]] = copy.deepcopy(rows)
    else:
        section["kwargs"] = {**section["kwargs"], section["rows"]: copy.deepcopy(rows)}
    return {**spec, "function": section}


def arguments_of(spec: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a canonical spec, as the function is to get them.

    Raises UnresolvedReference for `${env:NAME}`: nobody would replace it.
    """
    section = spec["function"]
    args, kwargs = resolve_env([section.get("args") or [], section.get("kwargs") or {}], {})
    return args, kwargs
