"""Gives the tests of the probe simulated machines, and a probe in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from tests.fixtures.simulated_nvml import simulated_nvml

__all__ = ["simulated_nvml"]

PROBE = """
import json, sys
from gpuflow.fleet.hardware import probe
print(json.dumps(probe(**json.loads(sys.argv[1])).to_dict()))
"""


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


@pytest.fixture
def probed(run_python):
    """Return a function that probes a machine with the real pynvml, and gives Hardware as plain data."""

    def run(env, **arguments):
        return json.loads(run_python(PROBE, env, json.dumps(arguments)))

    return run
