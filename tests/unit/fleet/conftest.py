"""Gives the tests of the GPU ledger simulated machines, and Python in a process that has one."""

import os
import subprocess
import sys

import pytest

from tests.fixtures.simulated_nvml import simulated_nvml

__all__ = ["simulated_nvml"]


@pytest.fixture
def run_python():
    """Return a function that runs code with a machine's environment and returns its stdout."""

    def run(code, env, *arguments):
        clean = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, *arguments],
            env={**clean, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
