"""--set, --label and where a template comes from."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.cli.options import add_label, load_template, override
from gpuflow.errors import InvalidTemplate

TEMPLATE: dict[str, Any] = {
    "apiVersion": "gpuflow/v1",
    "spec": {
        "taskType": "echo",
        "data": {"type": "list", "items": ["a", "b"]},
        "stages": [{"name": "one", "spec": {"echo": {"steps": 1}}}, {"name": "two", "spec": {}}],
    },
}


@pytest.mark.parametrize(
    ("path", "text", "where", "value"),
    [
        ("timeout", "2h", ("spec", "timeout"), "2h"),
        ("spec.timeout", "60", ("spec", "timeout"), 60),
        ("metadata.name", "x", ("metadata", "name"), "x"),
        ("data.items[1]", "c", ("spec", "data", "items", 1), "c"),
        ("data.items", "[x, 1]", ("spec", "data", "items"), ["x", 1]),
        ("training.learning_rate", "1.0e-3", ("spec", "training", "learning_rate"), 0.001),
        ("training.save_model", "true", ("spec", "training", "save_model"), True),
        ("inference.seed", "null", ("spec", "inference", "seed"), None),
        ("inference.stop", '"7"', ("spec", "inference", "stop"), "7"),
        ("inference.system_prompt", "a=b", ("spec", "inference", "system_prompt"), "a=b"),
        ("stages[0].spec.echo.steps", "3", ("spec", "stages", 0, "spec", "echo", "steps"), 3),
        ("stages.two.echo.steps", "3", ("spec", "stages", 1, "spec", "echo", "steps"), 3),
        ("stages.two.spec.echo.steps", "3", ("spec", "stages", 1, "spec", "echo", "steps"), 3),
        ("stages.one.name", "first", ("spec", "stages", 0, "name"), "first"),
    ],
)
def test_set_puts_a_yaml_value_where_the_path_says(path: str, text: str, where: tuple[Any, ...], value: Any) -> None:
    found: Any = override(TEMPLATE, path, text)
    for step in where:
        found = found[step]
    assert found == value
    assert TEMPLATE["spec"]["data"]["items"] == ["a", "b"]


def test_set_works_on_a_bare_task_spec() -> None:
    assert override({"taskType": "echo"}, "timeout", "1")["timeout"] == 1


@pytest.mark.parametrize(
    "path", ["", ".", "a..b", "data.items[9]", "data.items[x]", "stages.three.timeout", "[0]", "a b"]
)
def test_a_path_that_leads_nowhere_is_bad_input(path: str) -> None:
    with pytest.raises(click.UsageError, match="--set"):
        override(TEMPLATE, path, "1")


@given(st.text(max_size=30), st.text(max_size=30))
def test_set_never_fails_but_with_a_usage_error_or_a_template_report(path: str, text: str) -> None:
    with contextlib.suppress(click.UsageError, InvalidTemplate):
        assert isinstance(override(TEMPLATE, path, text), dict)


def test_label_joins_those_that_are_there() -> None:
    given_labels = {"spec": {"taskType": "echo", "resources": {"labels": {"a": "1"}, "accelerators": "A100"}}}
    changed = add_label(given_labels, "team", "nlp-*")
    assert changed["spec"]["resources"] == {"labels": {"a": "1", "team": "nlp-*"}, "accelerators": "A100"}
    assert add_label({"taskType": "echo"}, "x", "")["resources"] == {"labels": {"x": ""}}


def test_label_needs_resources_to_be_a_mapping() -> None:
    with pytest.raises(click.UsageError, match="resources"):
        add_label({"spec": {"resources": "A100:1"}}, "a", "b")


@pytest.mark.parametrize("option", ["noequals", "=1", ""])
def test_an_assignment_needs_name_and_value(option: str, tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="NAME=VALUE"):
        load_template(str(tmp_path / "x.yaml"), [option])


def test_mistakes_after_set_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("apiVersion: gpuflow/v1\nspec: {taskType: echo}\n")
    with pytest.raises(InvalidTemplate, match=r"t\.yaml: spec\.priority") as caught:
        load_template(str(path), ["priority=99"])
    assert [mistake.path for mistake in caught.value.mistakes] == ["spec.priority"]
    assert load_template(str(path), ["priority=9"]).source == str(path)


@pytest.mark.parametrize("text", ["[1, 2]", "just text", ""])
def test_set_on_what_is_no_mapping_is_a_report(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(InvalidTemplate):
        load_template(str(path), ["a=1"])
