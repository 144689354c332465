"""Fixtures of the chaos tests: short leases, and workers that die where a test tells them to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import Fault
from tests.fixtures.fleets import OPTIONS, fleet, long_fleet

__all__ = ["OPTIONS", "fleet", "long_fleet"]

#: Term of a lease in these tests, in seconds.
LEASE_SECONDS = 3
#: At level DEBUG nothing of what an outage causes is left out of the log.
SAYS_ALL = {"LOG_LEVEL": "DEBUG"}
LEASE = {"GPUFLOW_LEASE_SEC": str(LEASE_SECONDS), **SAYS_ALL}
#: Options of a worker that can be told to die.
MORTAL = ("--include", "faults,tallies")


@pytest.fixture
def fault(tmp_path: Path) -> Fault:
    """A place for a worker to die at."""
    return Fault(tmp_path)


@pytest.fixture(scope="module")
def long_fault(tmp_path_factory: pytest.TempPathFactory) -> Fault:
    """The same for a whole module."""
    return Fault(tmp_path_factory.mktemp("fault"))
