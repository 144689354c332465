"""Fixtures of the tests that build environments: a workshop with a tiny one, not built, or built once for all."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import Workshop


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A workshop whose `tiny` is built; for tests that leave it working."""
    workshop = Workshop(tmp_path_factory.mktemp("built"))
    done = workshop.create()
    assert done.returncode == 0, done.stderr
    return workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture
def begun(workshop: Workshop) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start command lines that are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        started.append(workshop.start(*arguments, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
