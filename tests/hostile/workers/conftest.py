"""Fixtures of the attacks on workers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.fleets import fleet
from tests.support.users import User, made_user, need_root

__all__ = ["fleet"]


@pytest.fixture(scope="session")
def ana() -> Iterator[User]:
    """A user of this machine."""
    need_root()
    with made_user() as user:
        yield user


@pytest.fixture(scope="session")
def ben() -> Iterator[User]:
    """Another user of this machine."""
    need_root()
    with made_user() as user:
        yield user


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which every user of the machine can search."""
    folder = Path(tempfile.mkdtemp(prefix="gpuflow-test-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
