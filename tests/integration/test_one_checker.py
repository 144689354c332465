"""validate, explain, submit and run are of one mind about a template, and dispatch has nothing to add.

All mistakes and all warnings are compared by place and text; of `run` the report of its command line.
"""

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
from gpuflow.spec import Template
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


def validated(source: dict[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Return the mistakes and the warnings that `gpuflow validate` lists."""
    file = folder / "made.json"
    file.write_text(json.dumps(source))
    told = CliRunner().invoke(cli, ["validate", str(file), "--json"])
    answer = json.loads(told.stdout)
    assert told.exit_code == (0 if answer["valid"] else 2), told.stderr
    return _lines(answer["mistakes"]), _lines(answer["warnings"])


def _lines(found: list[dict[str, Any]]) -> list[str]:
    return [f"{one['path']}: {one['message']}" for one in found]


def on_the_command_line(command: str, folder: Path) -> tuple[int, list[str]]:
    """Return the exit code of a command for the file that was made, and what it tells of the template, line by line."""
    file = str(folder / "made.json")
    told = CliRunner().invoke(cli, [command, file])
    lines = [line.removeprefix("warning: ") for line in told.stderr.splitlines()]
    filled = ("is left out in part, and filled in", "brings code", "asks for secrets")
    own = [line for line in lines if line.startswith(file) and not any(words in line for words in filled)]
    return told.exit_code, sorted(own)


@pytest.fixture
def made() -> Iterator[dict[str, Any]]:
    return (make_template(seed) for seed in range(TEMPLATES))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, fleet: TestFleet) -> list[Template]:
    """Let commands find the fleet, and `gpuflow run` end where it would start its cluster; return what it would run."""
    monkeypatch.setenv("REDIS_URL", fleet.broker.url)
    monkeypatch.setenv("RESULTS_DIR", str(fleet.results))
    found: list[Template] = []
    monkeypatch.setattr("gpuflow.cli.run.kept_here", lambda template: found.append(template) or template)
    monkeypatch.setattr("gpuflow.cli.run.run_local", lambda *args, **kwargs: 0)
    return found


def test_all_who_read_a_template_find_the_same_mistakes_and_warnings(
    fleet: TestFleet, tmp_path: Path, made: Iterator[dict[str, Any]], started: list[Template]
) -> None:
    taken = 0
    for source in made:
        validate, warnings = validated(source, tmp_path)
        explain = mistakes_of(lambda source=source: gpuflow.explain(source, app=fleet.app))
        submit = mistakes_of(lambda source=source: submit_pipeline(source, app=fleet.app))

        assert validate == explain == submit, source
        shown = {
            command: on_the_command_line(command, tmp_path) for command in ("validate", "explain", "submit", "run")
        }
        assert len({tuple(lines) for _, lines in shown.values()}) == 1, (source, shown)
        assert {code for code, _ in shown.values()} == {2 if validate else 0}, (source, shown)
        assert len(shown["run"][1]) == len(validate) + len(warnings)
        assert bool(started) == (not validate)
        started.clear()
        if not validate:
            assert _lines([one.to_dict() for one in parse(source).warnings]) == warnings
            taken += 1
            late = [mistakes_of(lambda stage=stage: dispatched(stage)) for stage in parse(source).stages]
            assert not any(late), source
    assert TEMPLATES // 4 < taken < TEMPLATES * 3 // 4, "valid ones and others"


def dispatched(stage: Any) -> None:
    if not stage.references:
        task_specs(stage, lambda name: {}, lambda value: value)
