"""The map of the house: every file, step and function that docs/architecture.md names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PLACES = sorted(set(re.findall(r"`((?:gpuflow|executors|tasks)/[\w/*.]+\.py)(?::([\w.]+))?`", TEXT)))


def defined(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the names that a module or class defines, each with the statements inside."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement.body
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from ((target.id, []) for target in targets if isinstance(target, ast.Name))


def test_there_are_places_of_each_kind() -> None:
    assert len([name for _, name in PLACES if name]) > 30


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_what_it_names_is_there(place: str, name: str) -> None:
    assert list(ROOT.glob(place)), place
    body = ast.parse((ROOT / place).read_text("utf-8")).body if name else []
    for part in filter(None, name.split(".")):
        inside = dict(defined(body))
        assert part in inside, f"{place} does not define {name}"
        body = inside[part]


@pytest.mark.parametrize("step", sorted(set(re.findall(r"`?\b(\w+\.lua)\b", TEXT))))
def test_every_step_in_the_broker_is_there(step: str) -> None:
    assert list((ROOT / "gpuflow").rglob(f"lua/{step}"))


def test_the_steps_are_in_the_folders_that_it_names() -> None:
    named = TEXT[TEXT.index("Steps in the broker:") :].partition("\n\n")[0].partition(":")[2]
    folders = re.findall(r"([\w,\s]+?)\s+in\s+`(gpuflow/\w+/lua/)`", named)
    steps = [(folder, step) for words, folder in folders for step in re.findall(r"\w+", words) if step != "and"]
    assert len(steps) == 12
    assert [step for folder, step in steps if not (ROOT / folder / f"{step}.lua").is_file()] == []
