"""Fixtures of all tests. A service that is missing makes a test fail, never skip."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Last, so that an installed gpuflow is the one that is tested (tox tests the wheel).
sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpuflow.process_guard import process_umask
from tests.support.fleet import TestFleet

pytest_plugins = ["tests.gate.plugin"]

# No example is judged by its time: that would be a test of the machine.
settings.register_profile("gpuflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpuflow")

# A CI runner may have started us with SIGINT ignored, and every child would inherit that: Ctrl-C is tested by it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def signals_kept() -> Iterator[None]:
    """A signal that a test leaves ignored would be ignored by every process that a later test starts."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture(autouse=True)
def umask_kept() -> Iterator[None]:
    """The umask of a command that a test runs in this process would be that of all later tests."""
    before = process_umask()
    yield
    after = process_umask()
    os.umask(before)
    assert after == before


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TestFleet]:
    """A real broker and whatever workers the test starts."""
    made = TestFleet(tmp_path)
    try:
        yield made
    finally:
        made.close()
