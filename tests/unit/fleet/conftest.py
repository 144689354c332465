"""Gives the tests of the GPU locks simulated machines, and Python in a process that has one."""

from tests.fixtures.simulated_nvml import run_python, simulated_nvml

__all__ = ["run_python", "simulated_nvml"]
