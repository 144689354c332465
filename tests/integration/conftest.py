"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fixtures.fleets import OPTIONS, fleet, long_fleet
from tests.support.fleet import TestFleet

__all__ = ["OPTIONS", "fleet", "long_fleet"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """A broker that one worker serves, `w1`, for all tests of a module that leave both as they were."""
    made = TestFleet(tmp_path_factory.mktemp("served"), options=OPTIONS)
    try:
        made.start_worker("w1", "--max-jobs", "3")
        yield made
    finally:
        made.close()
