"""Environments of executors: virtual environments with pins of their own, built, checked and found by name.

vLLM and the training stack pin different versions of the same libraries, so an executor names the environment that it
runs in. Called by `gpuflow env`, `gpuflow doctor` and the worker. Nothing here loads a library of an executor: those
are loaded by the environment's own Python, in a child process.
"""

from gpuflow.environments.building import Built, create
from gpuflow.environments.definition import DEFAULT, Definition, UnknownEnvironment, Variant, load, names
from gpuflow.environments.installing import Progress
from gpuflow.environments.places import Place
from gpuflow.environments.standing import Ready, Standing, examine, find, python_of, standings, working

__all__ = [
    "DEFAULT",
    "Built",
    "Definition",
    "Place",
    "Progress",
    "Ready",
    "Standing",
    "UnknownEnvironment",
    "Variant",
    "create",
    "examine",
    "find",
    "load",
    "names",
    "python_of",
    "standings",
    "working",
]
