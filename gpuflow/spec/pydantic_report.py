"""Puts what pydantic finds into our words: path, cause and mend, with near names for unknown fields.

Used by `checking` and `parsing`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from gpuflow.spec.report import DID_YOU_MEAN, Findings, Path, one_of, show, suggest

#: Sections in which FlowMesh's programs pass over fields that they do not know; elsewhere they refuse them.
OPEN: Final = frozenset(
    {"data", "checkpoint", "reward_model", "generation", "qdrant", "embedding", "search", "labels", "annotations"}
)
#: Most fields that are listed beside an unknown one.
_MAX_LISTED: Final = 12
_WANTED: Final = {
    "string_type": "text; put it in quotes", "int_type": "a whole number", "int_parsing": "a whole number",
    "int_from_float": "a whole number", "float_type": "a number", "float_parsing": "a number",
    "bool_type": "true or false", "bool_parsing": "true or false", "dict_type": "a mapping", "list_type": "a list",
    "model_type": "a mapping", "model_attributes_type": "a mapping", "finite_number": "a finite number",
    "int_parsing_size": "a smaller number",
}  # fmt: skip


def report(
    error: ValidationError, model: type[BaseModel], findings: Findings, pending: Callable[[Any], bool], *, lenient: bool
) -> tuple[bool, list[Path]]:
    """Note what `error` says. Returns whether it holds a real mistake, and the unknown fields that were warned of.

    A value for which `pending` holds (it is still to be replaced) is passed over; keys are never replaced. `lenient`
    makes an unknown field a warning where its own project takes any field, and it is no slip of a known one.
    """
    wrong, unknown = False, list[Path]()
    for one in error.errors(include_url=False):
        if findings.full:
            return True, unknown
        path: Path = tuple(part for part in one["loc"] if part != "[key]")
        if pending(one["input"]) and one["loc"][-1:] != ("[key]",):
            wrong = True
            continue
        if one["type"] == "extra_forbidden":
            message = f"unknown field{_near(path, model)}"
            is_passed_over = (findings.takes_any or path[0] in OPEN) and DID_YOU_MEAN not in message
            if lenient and is_passed_over:
                findings.warn(path, f"{message}; it is not used")
                unknown.append(path)
                continue
            findings.add(path, message)
        else:
            index = ""
            message = _message(one, path)
            if message.startswith("["):
                index, message = message[1:].split("]", 1)
            findings.add((*path, int(index)) if index else path, message.strip())
        wrong = True
    return wrong, unknown


def _message(one: Any, path: Path) -> str:
    kind, context, given = one["type"], one.get("ctx") or {}, show(one["input"], path)
    if kind == "missing":
        return "is required and missing"
    if kind == "value_error":
        return str(context["error"])
    if kind in _WANTED:
        return f"is {given}; it must be {_WANTED[kind]}"
    if kind in ("literal_error", "enum"):
        choices = str(context["expected"]).replace("'", "")
        near = suggest(one["input"], choices.replace(" or ", ", ").split(", ")) if isinstance(one["input"], str) else ""
        return f"is {given}; it must be {choices}{near}"
    limits = {
        "greater_than": "above {gt}", "greater_than_equal": "at least {ge}", "less_than": "below {lt}",
        "less_than_equal": "at most {le}",
    }  # fmt: skip
    if kind in limits:
        return f"is {given}; it must be {limits[kind].format(**context)}"
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        least, most = context.get("min_length"), context.get("max_length")
        size = f"at least {least}" if "short" in kind else f"at most {most}"
        return f"is {given}; its length must be {size}"
    return f"is {given}; {str(one['msg'])[:1].lower()}{str(one['msg'])[1:]}"


def _near(path: Path, model: type[BaseModel]) -> str:
    owner = _model_at(path[:-1], model)
    if owner is None:
        return ""
    names = list(owner.model_fields)
    listed = f"; the fields here are {one_of(names)}" if len(names) <= _MAX_LISTED else ""
    return suggest(path[-1], names) or listed


def _model_at(path: Path, model: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model that a path leads to, through optional fields, lists and mappings."""
    current: Any = model
    for part in path:
        owner = next((kind for kind in _parts(current) if _is_model(kind)), None)
        if owner is not None and not isinstance(part, int):
            info = owner.model_fields.get(part)
            if info is None:
                return None
            current = info.annotation
        else:
            current = next((args[-1] for args in map(typing.get_args, _parts(current)) if args), None)
    return next((kind for kind in _parts(current) if _is_model(kind)), None)


def _parts(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
