"""Conditions of stages: what holds over which results, and what is told of it."""

from __future__ import annotations

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import Template, parse_text, pick
from gpuflow.spec.conditions import MAX_DEPTH, MAX_TESTS, ConditionError, StageSkipped, condition_holds
from gpuflow.spec.references import UnresolvedReference

RESULT = {
    "number": 3,
    "half": 0.5,
    "yes": True,
    "text": "a good answer",
    "nothing": None,
    "items": [{"output": "run-me"}, {"output": "not me"}],
    "tags": ["red", 1],
}


def lookup(reference):
    if reference.stage == "skipped":
        raise StageSkipped("stage 'skipped' was skipped")
    return pick(RESULT, reference)


def value(path, **comparisons):
    return {"value": "${first.result." + path + "}", **comparisons}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (value("number", equals=3), True),
        (value("number", equals=3.0), True),
        (value("number", equals="3"), False),
        (value("number", equals=True), False),
        (value("yes", equals=True), True),
        (value("yes", equals=1), False),
        (value("nothing", equals=None), True),
        (value("text", not_equals="x"), True),
        (value("items[0].output", equals="run-me"), True),
        (value("items.0.output", equals="run-me"), True),
        (value("items[1]", equals={"output": "not me"}), True),
        (value("tags", equals=["red", True]), False),
        (value("number", greater_than=2, less_than=4), True),
        (value("number", greater_than=2, less_than=3), False),
        (value("half", at_least=0.5, at_most=0.5), True),
        (value("text", at_least="a"), True),
        (value("text", contains="good"), True),
        (value("text", contains="bad"), False),
        (value("tags", contains=1), True),
        (value("tags", contains=True), False),
        (value("items[0]", contains="output"), True),
        (value("number", contains=3), False),
        (value("number", **{"in": [1, 3]}), True),
        (value("text", **{"in": ["x"]}), False),
        (value("number", at_least="${first.result.half}"), True),
        (value("absent", exists=False), True),
        (value("absent", exists=True), False),
        (value("nothing", exists=True), True),
        ({"value": "${skipped.result.x}", "exists": True}, False),
        ({"value": "${skipped.result.x}", "exists": False}, True),
        ({"value": "${skipped.result.x}", "equals": 1}, False),
        ({"all": [value("number", equals=3), value("yes", equals=True)]}, True),
        ({"all": [value("number", equals=3), value("yes", equals=False)]}, False),
        ({"any": [value("number", equals=4), value("yes", equals=True)]}, True),
        ({"any": [value("number", equals=4), value("yes", equals=False)]}, False),
        ({"not": value("number", equals=4)}, True),
        ({"not": {"any": [value("number", equals=3)]}}, False),
        ({"any": [value("yes", equals=True), value("absent", equals=1)]}, True),
    ],
)
def test_a_condition_holds_over_results(condition, holds):
    assert condition_holds(condition, lookup).holds is holds


def test_the_reason_names_the_value():
    assert condition_holds(value("number", at_least=5), lookup).reason == "${first.result.number} is 3, not at least 5"
    long = condition_holds({"value": "${first.result.text}", "equals": "x" * 1000}, lookup).reason
    assert len(long) < 250


def test_a_value_that_is_missing_is_no_false():
    with pytest.raises(UnresolvedReference, match="has no 'absent'"):
        condition_holds(value("absent", equals=1), lookup)
    with pytest.raises(ConditionError, match="cannot be put in order"):
        condition_holds(value("text", greater_than=1), lookup)


def _template(condition, version="gpuflow/v1"):
    nodes = f"[{{name: first}}, {{name: second, dependsOn: [first], condition: {condition}}}]"
    return parse_text(f"apiVersion: {version}\nspec: {{taskType: echo, graph: {{nodes: {nodes}}}}}\n", "x")


def test_a_condition_makes_a_dependency_and_is_stored():
    text = (
        "apiVersion: gpuflow/v1\nspec: {taskType: echo, graph: {nodes: [{name: first}, {name: second, condition: %s}]}}"
    )
    template = parse_text(text % "{value: '${first.result.x}', equals: 1}", "x")

    assert template.stage("second").depends_on == ("first",)
    assert template.stage("second").reads == frozenset()
    assert template.to_dict()["schema"] == 2
    assert Template.from_dict(template.to_dict()) == template
    assert parse_text("apiVersion: gpuflow/v1\nspec: {taskType: echo}", "x").to_dict()["schema"] == 1


@pytest.mark.parametrize("version", ["flowmesh/v1", "mloc/v1"])
@pytest.mark.parametrize("name", ["field", "path"])
def test_the_spelling_of_flowmesh_is_read(version, name):
    template = _template(f"{{node: first, {name}: items.0.output, equals: run-me}}", version)

    assert template.stage("second").condition == {"value": "${first.result.items.0.output}", "equals": "run-me"}
    assert not template.warnings
    with pytest.raises(InvalidTemplate, match="node"):
        _template(f"{{node: first, {name}: items.0.output, equals: run-me}}")


def test_a_single_task_has_no_condition():
    for version in ("gpuflow/v1", "flowmesh/v1"):
        with pytest.raises(InvalidTemplate, match="condition"):
            parse_text(f"apiVersion: {version}\nspec: {{taskType: echo, condition: {{node: a, equals: 1}}}}", "x")


def test_size_is_bounded():
    deep = "{value: '${first.x}', exists: true}"
    for _ in range(2 * MAX_DEPTH + 1):
        deep = f"{{not: {deep}}}"
    with pytest.raises(InvalidTemplate, match="nested more than"):
        _template(deep)
    many = ", ".join(["{value: '${first.x}', exists: true}"] * (MAX_TESTS + 1))
    with pytest.raises(InvalidTemplate, match="at most 100"):
        _template(f"{{any: [{many}]}}")
