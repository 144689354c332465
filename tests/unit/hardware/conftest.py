"""Gives the tests of the probe simulated machines, and a probe in a process of its own."""

import json

import pytest

from tests.fixtures.simulated_nvml import run_python, simulated_nvml

__all__ = ["run_python", "simulated_nvml"]

PROBE = """
import json, sys
from gpuflow.fleet.hardware import probe
print(json.dumps(probe(**json.loads(sys.argv[1])).to_dict()))
"""


@pytest.fixture
def probed(run_python):
    """Return a function that probes a machine with the real pynvml, and gives Hardware as plain data."""

    def run(env, **arguments):
        return json.loads(run_python(PROBE, env, json.dumps(arguments)))

    return run
