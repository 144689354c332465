"""Fixtures of pytest for the tests of a team's own tasks: `pytest_plugins = ["gpuflow.testing"]`.

A real server, real workers on machines with simulated GPUs, or Celery's eager mode without either. Needs the extra
`gpuflow[testing]`. docs/howto/test-your-tasks.md shows how they are used.
"""

from gpuflow.testing.fixtures import (
    gpuflow_eager,
    gpuflow_fleet,
    gpuflow_server,
    pytest_addoption,
    pytest_configure,
    pytest_runtest_makereport,
)
from gpuflow.testing.fleet import SimulatedMachine, TestFleet, TestWorker
from gpuflow.testing.server import TestServer
from gpuflow.testing.simulated_gpus import SimGpu

__all__ = [
    "SimGpu",
    "SimulatedMachine",
    "TestFleet",
    "TestServer",
    "TestWorker",
    "gpuflow_eager",
    "gpuflow_fleet",
    "gpuflow_server",
    "pytest_addoption",
    "pytest_configure",
    "pytest_runtest_makereport",
]
