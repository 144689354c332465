"""Fixtures of all tests. A service that is missing makes a test fail, never skip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import TestFleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TestFleet]:
    """A real broker and whatever workers the test starts."""
    made = TestFleet(tmp_path)
    try:
        yield made
    finally:
        made.close()
