"""The fixtures and hooks of the pytest plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Final

import pytest

from gpuflow.celery_app import GPUFlow, app
from gpuflow.errors import GPUFlowError
from gpuflow.testing import eager
from gpuflow.testing.environment import without_addresses
from gpuflow.testing.fleet import TestFleet
from gpuflow.testing.pointing import nowhere, point
from gpuflow.testing.server import TestServer

_SERVER: Final = pytest.StashKey[TestServer]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings of the plugin."""
    parser.addini("gpuflow_timeout", "how long fixtures of gpuflow wait for a condition, in seconds", default="60")


def pytest_configure(config: pytest.Config) -> None:
    """Point the app away from every server, so that a test without a fixture reaches none of the developer's."""
    text = config.getini("gpuflow_timeout")
    try:
        timeout = float(text)
    except ValueError:
        raise pytest.UsageError(f"gpuflow_timeout: {text!r} is no number of seconds; set one, such as 60") from None
    server = config.stash[_SERVER] = TestServer(app, timeout=timeout)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_addresses())
        stack.callback(server.close)  # first: what an interrupted session has left
        point(app, nowhere())
        config.add_cleanup(stack.pop_all().close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the workers' logs with a test that has failed."""
    report = yield
    server = item.config.stash.get(_SERVER, None)
    fleet = server.fleet_in_use if server is not None else None
    if report.failed and fleet is not None:
        report.sections += [(f"Log of gpuflow worker {worker.name}", worker.log_tail()) for worker in fleet.workers]
    return report


@pytest.fixture(scope="session")
def gpuflow_server(pytestconfig: pytest.Config) -> Iterator[TestServer]:
    """A real Valkey server of this test process, and `gpuflow.app` pointed at it."""
    server = pytestconfig.stash[_SERVER]
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def gpuflow_fleet(gpuflow_server: TestServer) -> Iterator[TestFleet]:
    """A fleet on an empty server, without workers: start them by `gpuflow_fleet.start_worker("my_team.jobs")`."""
    with gpuflow_server.fleet() as fleet:
        yield fleet


@pytest.fixture
def gpuflow_eager(pytestconfig: pytest.Config) -> Iterator[GPUFlow]:
    """The app in Celery's eager mode: a call runs in the process of the test, at once, without a server."""
    server = pytestconfig.stash[_SERVER]
    if server.fleet_in_use is not None:
        raise GPUFlowError("gpuflow_eager: a fleet is in use; a test takes gpuflow_eager or a fleet, not both")
    with eager.eager(app):
        yield app
