"""The `condition` of a stage: whether it runs, judged over what the stages before it gave. No code, no side effects.

A condition is a test `{value: "${stage.result.path}", equals: ...}`, or `all`, `any` (lists) or `not` of conditions.
Several comparisons of one test must all hold. FlowMesh's `{node, field, equals}` is read as a test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.errors import GPUFlowError
from gpuflow.spec.references import Reference, UnresolvedReference, references_in
from gpuflow.spec.report import Findings, Path, one_of, show, suggest

#: Deepest nesting, and most tests of one condition.
MAX_DEPTH: Final = 10
MAX_TESTS: Final = 100
_GROUPS: Final = ("all", "any", "not")
_LONGEST_SHOWN: Final = 80


class StageSkipped(UnresolvedReference):
    """A reference names a stage that was skipped, so it has no value."""


class ConditionError(GPUFlowError):
    """A condition compares what cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a condition holds, and the first test that decided so, in words."""

    holds: bool
    reason: str


def check_condition(given: Any, findings: Findings, *, foreign: bool) -> dict[str, Any] | None:
    """Return a condition in its one form; what is wrong is noted in `findings`, whose root is the condition."""
    counted: list[Path] = []
    checked = _checked(given, (), findings, counted, foreign=foreign)
    if len(counted) > MAX_TESTS:
        findings.add((), f"has {len(counted)} tests; give at most {MAX_TESTS}")
    return checked


def condition_holds(condition: Mapping[str, Any], lookup: Callable[[Reference], Any]) -> Verdict:
    """Judge a checked condition; `lookup` gives the value of a reference, or raises UnresolvedReference.

    `exists` asks for just that; any other comparison of a value that a skipped stage would have given does not hold.
    Raises UnresolvedReference for another missing value, ConditionError for what cannot be compared.
    """
    if "not" in condition:
        inner = condition_holds(condition["not"], lookup)
        return Verdict(holds=not inner.holds, reason=inner.reason)
    for name, deciding in (("all", False), ("any", True)):
        if name in condition:
            verdicts = []
            for one in condition[name]:
                verdicts.append(condition_holds(one, lookup))
                if verdicts[-1].holds is deciding:
                    return verdicts[-1]
            return Verdict(holds=not deciding, reason="; ".join(verdict.reason for verdict in verdicts)[:500])
    return _test(condition, lookup)


def _checked(given: Any, at: Path, findings: Findings, counted: list[Path], *, foreign: bool) -> dict[str, Any] | None:
    if len(at) > 2 * MAX_DEPTH:
        findings.add(at, f"is nested more than {MAX_DEPTH} deep; write it flatter")
        return None
    if not isinstance(given, Mapping):
        findings.add(
            at, f"is {show(given)}; a condition is a mapping, as in {{value: '${{first.result.x}}', equals: 1}}"
        )
        return None
    groups = [name for name in _GROUPS if name in given]
    if groups:
        if len(given) > 1:
            findings.add(at, f"has {groups[0]} and more beside it; put each into a condition of its own, under all")
            return None
        return _group(groups[0], given[groups[0]], at, findings, counted, foreign=foreign)
    counted.append(at)
    test = dict(given)
    if foreign and isinstance(test.get("node"), str) and "value" not in test:
        field = test.pop("field", None) or test.pop("path", None) or "items"
        test["value"] = "${" + f"{test.pop('node')}.result.{str(field).removeprefix('result.')}" + "}"
    return _checked_test(test, at, findings)


def _group(
    name: str, inner: Any, at: Path, findings: Findings, counted: list[Path], *, foreign: bool
) -> dict[str, Any] | None:
    if name == "not":
        checked = _checked(inner, (*at, name), findings, counted, foreign=foreign)
        return None if checked is None else {name: checked}
    if not isinstance(inner, list) or not inner:
        findings.add((*at, name), "must be a list of conditions, of one or more")
        return None
    parts = [
        _checked(one, (*at, name, index), findings, counted, foreign=foreign)
        for index, one in enumerate(inner[: MAX_TESTS + 1])
    ]
    return {name: [part for part in parts if part is not None]}


def _checked_test(test: dict[str, Any], at: Path, findings: Findings) -> dict[str, Any] | None:
    unknown = [name for name in test if name != "value" and name not in _COMPARISONS]
    for name in unknown:
        known = ("value", *_COMPARISONS, *_GROUPS)
        findings.add((*at, name), f"is no comparison{suggest(name, known) or f'; give {one_of(_COMPARISONS)}'}")
    if "value" not in test:
        findings.add(at, "has no value; give a reference, as in value: '${first.result.items[0].output}'")
        return None
    reference = _whole_reference(test["value"])
    if reference is None or reference.kind != "stage":
        findings.add(
            (*at, "value"), f"is {show(test['value'])}; it must be one reference to a stage, ${{stage.result.path}}"
        )
        return None
    if len(test) == 1:
        findings.add(at, f"compares with nothing; give {one_of(_COMPARISONS)}")
        return None
    if unknown:
        return None
    for name, operand in test.items():
        problem = None if name == "value" else _operand_problem(name, operand)
        if problem:
            findings.add((*at, name), problem)
    return test


def _operand_problem(name: str, operand: Any) -> str | None:
    if name == "exists" and not isinstance(operand, bool):
        return f"is {show(operand)}; it must be true or false"
    if _whole_reference(operand) is not None:
        return None
    if name == "in" and not isinstance(operand, list):
        return f"is {show(operand)}; it must be a list of values"
    if name in _ORDERED and (isinstance(operand, bool) or not isinstance(operand, int | float | str)):
        return f"is {show(operand)}; it must be a number or text"
    return None


def _whole_reference(value: Any) -> Reference | None:
    found = list(references_in(value)) if isinstance(value, str) else []
    return found[0] if len(found) == 1 and isinstance(found[0], Reference) and found[0].text == value else None


def _test(test: Mapping[str, Any], lookup: Callable[[Reference], Any]) -> Verdict:
    text = str(test["value"])
    try:
        value, missing = _value(text, lookup), None
    except UnresolvedReference as error:
        value, missing = None, error
    for name, operand in test.items():
        if name == "value":
            continue
        if name == "exists":
            if operand is not (missing is None):
                return Verdict(holds=False, reason=f"{text} {'does not exist' if missing else 'exists'}")
            continue
        if missing is not None:
            if isinstance(missing, StageSkipped):
                return Verdict(holds=False, reason=str(missing))
            raise missing
        wanted = _value(operand, lookup)
        if not _COMPARISONS[name](value, wanted):
            return Verdict(holds=False, reason=f"{text} is {_shown(value)}, not {_WORDS[name]} {_shown(wanted)}")
    return Verdict(holds=True, reason=f"{text} is {_shown(value)}" if missing is None else f"{text} does not exist")


def _value(given: Any, lookup: Callable[[Reference], Any]) -> Any:
    reference = _whole_reference(given)
    return given if reference is None else lookup(reference)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _equals(value: Any, wanted: Any) -> bool:
    """Equality of JSON: true is not 1, and 1 is 1.0."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_equals, value, wanted))
    if isinstance(value, Mapping) and isinstance(wanted, Mapping):
        return value.keys() == wanted.keys() and all(_equals(value[key], wanted[key]) for key in value)
    return bool(value == wanted)


def _contains(value: Any, wanted: Any) -> bool:
    if isinstance(value, str):
        return isinstance(wanted, str) and wanted in value
    if isinstance(value, Mapping):
        return isinstance(wanted, str) and wanted in value
    return isinstance(value, list) and any(_equals(one, wanted) for one in value)


def _in(value: Any, wanted: Any) -> bool:
    return _contains(wanted, value)


def _order(value: Any, wanted: Any) -> int:
    """Return whether `value` is less (-1), equal (0) or greater (1). Raises ConditionError."""
    for kind in (str, int | float):
        if all(isinstance(one, kind) and not isinstance(one, bool) for one in (value, wanted)):
            return int(value > wanted) - int(value < wanted)
    raise ConditionError(
        f"{_shown(value)} and {_shown(wanted)} cannot be put in order; compare two numbers or two texts"
    )


_ORDERED: Final[Mapping[str, Callable[[int], bool]]] = {
    "greater_than": lambda order: order > 0,
    "at_least": lambda order: order >= 0,
    "less_than": lambda order: order < 0,
    "at_most": lambda order: order <= 0,
}


def _ordered(name: str) -> Callable[[Any, Any], bool]:
    return lambda value, wanted: _ORDERED[name](_order(value, wanted))


_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "equals": _equals,
    "not_equals": lambda value, wanted: not _equals(value, wanted),
    "contains": _contains,
    "in": _in,
    "exists": lambda value, wanted: True,
    **{name: _ordered(name) for name in _ORDERED},
}
_WORDS: Final = {
    "equals": "equal to",
    "not_equals": "other than",
    "contains": "with",
    "in": "one of",
    "greater_than": "greater than",
    "at_least": "at least",
    "less_than": "less than",
    "at_most": "at most",
}
