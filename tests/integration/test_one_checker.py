"""validate, explain, submit and run are of one mind about a template, and dispatch has nothing to add."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpuflow
from gpuflow.cli import cli
from gpuflow.client import submit_pipeline
from gpuflow.errors import InvalidTemplate
from gpuflow.pipelines.resolve import task_specs
from gpuflow.templates import parse
from tests.support.fleet import TestFleet
from tests.support.templates import make_template

TEMPLATES = 500


def mistakes_of(ask: Any) -> list[str]:
    """Return the mistakes of a template as an interface of Python tells them; none where it takes it."""
    try:
        ask()
    except InvalidTemplate as error:
        return [f"{one.path}: {one.message}" for one in error.mistakes] or [str(error)]
    return []


def validated(source: dict[str, Any], folder: Path) -> list[str]:
    """Return the mistakes that `gpuflow validate` lists."""
    file = folder / "made.json"
    file.write_text(json.dumps(source))
    told = CliRunner().invoke(cli, ["validate", str(file), "--json"])
    answer = json.loads(told.stdout)
    assert told.exit_code == (0 if answer["valid"] else 2), told.stderr
    return [f"{one['path']}: {one['message']}" for one in answer["mistakes"]]


@pytest.fixture
def made() -> Iterator[dict[str, Any]]:
    return (make_template(seed) for seed in range(TEMPLATES))


def test_all_who_read_a_template_find_the_same_mistakes(
    fleet: TestFleet, tmp_path: Path, made: Iterator[dict[str, Any]]
) -> None:
    taken = 0
    for source in made:
        validate = validated(source, tmp_path)
        explain = mistakes_of(lambda source=source: gpuflow.explain(source, app=fleet.app))
        submit = mistakes_of(lambda source=source: submit_pipeline(source, app=fleet.app))

        assert validate == explain == submit, source
        if not validate:
            taken += 1
            late = [mistakes_of(lambda stage=stage: dispatched(stage)) for stage in parse(source).stages]
            assert not any(late), source
    assert TEMPLATES // 4 < taken < TEMPLATES * 3 // 4, "valid ones and others"


def dispatched(stage: Any) -> None:
    if not stage.references:
        task_specs(stage, lambda name: {}, lambda value: value)
