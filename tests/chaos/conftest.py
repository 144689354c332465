"""Fixtures of the chaos tests: short leases, and workers that die where a test tells them to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.faults import Fault
from tests.fixtures.fleets import OPTIONS, fleet
from tests.support.fleet import TestFleet

__all__ = ["OPTIONS", "fleet"]

#: Term of a lease in these tests, in seconds.
LEASE_SECONDS = 3
LEASE = {"GPUFLOW_LEASE_SEC": str(LEASE_SECONDS)}
#: Options of a worker that can be told to die.
MORTAL = ("--include", "faults,tallies")


@pytest.fixture(scope="module")
def long_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """One broker, and whatever workers its tests start, for a whole module."""
    made = TestFleet(tmp_path_factory.mktemp("fleet"), options=OPTIONS)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def fault(tmp_path: Path) -> Fault:
    """A place for a worker to die at."""
    return Fault(tmp_path)


@pytest.fixture(scope="module")
def long_fault(tmp_path_factory: pytest.TempPathFactory) -> Fault:
    """The same for a whole module."""
    return Fault(tmp_path_factory.mktemp("fault"))
