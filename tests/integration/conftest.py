"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import TestFleet

#: Celery's workers look for others at their start for a whole second, and each test starts its own. The fleets
#: that test_transport makes, and the soak's workers, start as users start them.
OPTIONS = ("--without-mingle",)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TestFleet]:
    """A real broker and whatever workers the test starts."""
    made = TestFleet(tmp_path, options=OPTIONS)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """A broker that one worker serves, `w1`, for all tests of a module that leave both as they were."""
    made = TestFleet(tmp_path_factory.mktemp("served"), options=OPTIONS)
    try:
        made.start_worker("w1", "--max-jobs", "3")
        yield made
    finally:
        made.close()
