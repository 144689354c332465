"""Real child processes for the executors that need no ML library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.executor_child import Child, Ended, request_json


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Start a child for a task; it is gone when the test ends."""
    children: list[Child] = []

    def start_child(task_type: str, spec: dict[str, Any], env: dict[str, str] | None = None, **fields: Any) -> Child:
        children.append(Child(request_json(task_type, spec, tmp_path / "out", **fields), env, cwd=tmp_path))
        return children[-1]

    yield start_child
    for child in children:
        child.close()


@pytest.fixture
def echo(start: Callable[..., Child]) -> Callable[..., Ended]:
    """Run an echo task to its end."""

    def run(echo: dict[str, Any], **fields: Any) -> Ended:
        spec = {"taskType": "echo", "echo": echo, **fields.pop("spec", {})}
        return start("echo", spec, **fields).end()

    return run
