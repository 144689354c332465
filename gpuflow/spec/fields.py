"""Checks a section whose fields are a library's (training, lora, inference, model.vllm) against its shipped schema.

Used by `checking`. The schemas are files that tools/generate_schemas.py writes from the pinned libraries, so nothing
here imports one. Short names become the library's own; text that is a number becomes one; references are left in place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

from gpuflow.spec.references import is_pending
from gpuflow.spec.report import DID_YOU_MEAN, Findings, Path, one_of, show, suggest
from gpuflow.spec.sections import Section
from gpuflow.spec.units import as_number

#: Where a training run may report to; transformers' own list.
REPORTERS: Final = (
    "none", "all", "tensorboard", "wandb", "mlflow", "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub",
    "dvclive", "flyte", "neptune", "swanlab", "trackio",
)  # fmt: skip
_TRUE: Final = frozenset({"true", "yes", "on"})
_FALSE: Final = frozenset({"false", "no", "off"})
_WORDS: Final = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "a list",
    "dict": "a mapping", "null": "null", "list[str]": "a list of texts", "list[int]": "a list of whole numbers",
    "list[float]": "a list of numbers",
}  # fmt: skip


class Unfit(Exception):
    """A value is of no type that its field takes."""


@cache
def _schema_file(name: str) -> Mapping[str, Any]:
    text = resources.files("gpuflow.spec").joinpath("schemas", f"{name}.json").read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def load_schema(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return field -> {type, enum, default} of a shipped schema."""
    fields: dict[str, Mapping[str, Any]] = _schema_file(name)["fields"]
    return fields


def known_fields(section: Section) -> list[str]:
    """Return every name that the section takes, aliases and own fields included."""
    return sorted({*load_schema(section.schema), *section.aliases, *section.own} - set(section.managed))


def check_section(
    given: Mapping[str, Any],
    section: Section,
    path: Path,
    findings: Findings,
    *,
    lenient: bool,
    at_dispatch: bool = False,
) -> dict[str, Any]:
    """Return the section with the library's own names and typed values.

    `lenient` (flowmesh/v1, mloc/v1) leaves unknown fields out with a warning instead of a mistake, where they are no
    slips of known ones. `at_dispatch`, when references to stages have their values, only those to the child's
    environment are left as they are.
    """
    done: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in given.items():
        if findings.full:
            break
        here = (*path, name)
        target = section.aliases.get(name, name)
        entry = _entry(section, target)
        if name in section.managed or entry is None:
            _refuse(name, section, here, findings, lenient)
            continue
        fitted = (
            value
            if is_pending(value, at_dispatch=at_dispatch)
            else _fit_field(value, target, entry, section, here, findings)
        )
        if name == "warmup_ratio" and isinstance(fitted, int | float) and fitted >= 1:
            findings.add(
                here, f"is {show(fitted)}; a ratio is below 1, the trainer takes more for steps: write warmup_steps"
            )
        if target in done:
            if done[target] != fitted:
                findings.add(
                    here, f"and {written[target]!r} are the same field, but say {show(fitted)} and "
                    f"{show(done[target])}; keep one of them"
                )  # fmt: skip
            continue
        done[target], written[target] = fitted, name
    return done


def _entry(section: Section, name: str) -> Mapping[str, Any] | None:
    if name in section.own:
        return {"type": section.own[name]}
    return load_schema(section.schema).get(name)


def _refuse(name: str, section: Section, path: Path, findings: Findings, lenient: bool) -> None:
    if name in section.managed:
        message = f"is set by gpuflow; {section.managed[name]}"
    else:
        hint = f"; {section.hints[name]}" if name in section.hints else suggest(name, known_fields(section))
        message = f"unknown field{hint or '; the fields are those of ' + _schema_file(section.schema)['source']}"
    is_passed_over = DID_YOU_MEAN not in message if name not in section.hints else name in section.harmless
    if lenient and is_passed_over:
        findings.warn(path, f"{message}; it is not used")
    else:
        findings.add(path, message)


def _fit_field(
    value: Any, name: str, entry: Mapping[str, Any], section: Section, path: Path, findings: Findings
) -> Any:
    kinds, choices = entry["type"], entry.get("enum", ())
    try:
        fitted = fit(value, kinds, choices)
    except Unfit:
        wanted = [_WORDS[kind] for kind in kinds if kind in _WORDS and kind != "null"]
        wanted += [str(choice) for choice in choices[:24]]
        near = suggest(value, [str(choice) for choice in choices]) if isinstance(value, str) else ""
        findings.add(path, f"is {show(value, path)}; it must be {one_of(wanted) if wanted else 'null'}{near}")
        return value
    if isinstance(fitted, int | float) and not isinstance(fitted, bool) and name in section.bounds:
        wrong = section.bounds[name].mistake(fitted)
        if wrong:
            findings.add(path, f"is {show(fitted)}; it {wrong}")
    if name == "report_to" and fitted is not None:
        for one in fitted if isinstance(fitted, list) else [fitted]:
            if one not in REPORTERS:
                findings.add(path, f"is {show(one)}; it must be {one_of(REPORTERS)}{suggest(one, REPORTERS)}")
    return fitted


def fit(value: Any, kinds: list[str] | tuple[str, ...], choices: list[Any] | tuple[Any, ...] = ()) -> Any:
    """Return `value` as one of the types, with the safe conversions of text; raises Unfit."""
    if "any" in kinds or (value is None and "null" in kinds):
        return value
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    if isinstance(value, bool):
        return _fit_bool(value, kinds, choices)
    if isinstance(value, int | float):
        return _fit_number(value, kinds)
    if isinstance(value, str):
        return _fit_text(value, kinds, choices)
    if isinstance(value, list):
        return _fit_list(value, kinds)
    if isinstance(value, dict) and "dict" in kinds:
        return value
    raise Unfit


def _fit_bool(value: bool, kinds: list[str] | tuple[str, ...], choices: list[Any] | tuple[Any, ...]) -> Any:
    if "bool" in kinds:
        return value
    if not value and "no" in choices:
        return "no"  # save_strategy: no, as YAML 1.1 readers understood it
    raise Unfit


def _fit_number(value: float, kinds: list[str] | tuple[str, ...]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise Unfit
    if isinstance(value, int) and "int" in kinds:
        return value
    if "float" in kinds:
        return value if isinstance(value, int) and abs(value) > 2**53 else float(value)
    if "int" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    raise Unfit


def _fit_text(value: str, kinds: list[str] | tuple[str, ...], choices: list[Any] | tuple[Any, ...]) -> Any:
    if "str" in kinds:
        return value
    if "bool" in kinds and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    number = as_number(value)
    if number is not None and ("int" in kinds or "float" in kinds):
        return _fit_number(number, kinds)
    if "list[str]" in kinds:
        return [value]
    for choice in choices:
        if isinstance(choice, str) and re.sub(r"\W", "_", value).lower() == re.sub(r"\W", "_", choice).lower():
            return choice
    raise Unfit


def _fit_list(value: list[Any], kinds: list[str] | tuple[str, ...]) -> list[Any]:
    if "list" in kinds:
        return value
    for kind in kinds:
        if kind.startswith("list["):
            return [item if is_pending(item) else fit(item, [kind[5:-1]]) for item in value]
    raise Unfit
