"""Every example says what it does, stands in the table of the docs, and is run by a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuflow.spec import parse
from gpuflow.spec.presets import list_presets, load_preset
from gpuflow.spec.sections import TASK_TYPES
from tests.support.examples import PIPELINES, PRINTED, ROOT, RUN_BY, example_files

PAGE = (ROOT / "docs" / "reference" / "examples.md").read_text("utf-8")
NAMES = list_presets("pipelines")


@pytest.mark.parametrize("path", example_files())
def test_an_example_is_in_the_docs(path: str) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and f"(../../{path})" in line]

    assert len(rows) == 1, f"docs/reference/examples.md has {len(rows)} rows with a link to {path}"


@pytest.mark.parametrize("path", example_files())
def test_an_example_has_a_run(path: str) -> None:
    name = path.removeprefix("configs/pipelines/").removesuffix(".yaml")
    if name in PRINTED:
        assert path not in RUN_BY
        return
    assert path in RUN_BY, f"{path} has no run: add it to tests/support/examples.py, and its test"
    test = (ROOT / RUN_BY[path]).read_text("utf-8")
    file = Path(path)  # of a folder such as loading-worker the name of the folder will do
    words = {
        f'"{file.stem}"',
        f'"{file.name}"',
        f'"{file.parent.name}"',
    }

    assert any(word in test for word in words), f"{RUN_BY[path]} does not name {path}"


def test_the_tables_name_no_file_that_is_gone() -> None:
    assert sorted([*RUN_BY, *(f"configs/pipelines/{name}.yaml" for name in PRINTED)]) == example_files()


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_says_what_it_does_in_one_line_and_what_it_needs(name: str) -> None:
    text = (PIPELINES / f"{name}.yaml").read_text("utf-8")
    comment = text[: text.index("apiVersion")]
    metadata = load_preset("pipelines", name)["metadata"]

    assert re.fullmatch(r"[a-z0-9-]+", name) and metadata["name"] == name
    assert 10 < len(metadata["annotations"]["description"]) <= 90
    assert re.match(r"# [A-Z].*\n", comment)
    assert "# Needs: " in comment or ". Needs: " in comment
    assert "# Prints: " in comment


def test_every_task_type_has_an_example() -> None:
    used = {stage.spec["taskType"] for name in NAMES for stage in parse(name).stages}

    assert used == set(TASK_TYPES)
