"""A tiny model, and children that run real tasks with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.executor_child import Child, Ended, request_json
from tests.fixtures.executor_here import run_here
from tests.fixtures.tiny_model import PAIRS, make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("plain"), chat=False)


def _with_model(task_type: str, spec: dict[str, Any], model: Path) -> dict[str, Any]:
    source = {"source": {"type": "local", "identifier": str(model)}}
    return {"taskType": task_type, **spec, "model": {**source, **spec.get("model", {})}}


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Child]]:
    """Start a child for a task on the tiny model; it is gone when the test ends."""
    children: list[Child] = []

    def start_child(task_type: str, spec: dict[str, Any], out: str = "out", **fields: Any) -> Child:
        full = _with_model(task_type, spec, tiny_model)
        children.append(Child(request_json(task_type, full, tmp_path / out, **fields)))
        return children[-1]

    yield start_child
    for child in children:
        child.close()


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Callable[..., Ended]:
    """Run a task on the tiny model to its end, in this process."""

    def run_to_end(
        task_type: str, spec: dict[str, Any], out: str = "out", model: Path = tiny_model, **fields: Any
    ) -> Ended:
        return run_here(task_type, _with_model(task_type, spec, model), tmp_path / out, **fields)

    return run_to_end


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, Any]:
    """A data section of 24 pairs with usual names."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return {"type": "jsonl", "path": str(path), "eval_split": 0.2, "seed": 1}
