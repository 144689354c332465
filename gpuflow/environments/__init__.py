"""Environments of executors: virtual environments with pins of their own, built, checked and found by name.

vLLM and the training stack pin different versions of the same libraries, so an executor names the environment that it
runs in. Called by `gpuflow env`, `gpuflow doctor` and the worker. Nothing here loads a library of an executor: those
are loaded by the environment's own Python, in a child process.
"""

from gpuflow.environments.building import Built, create
from gpuflow.environments.choice import ChosenEnvironment, State, choose, offers_of
from gpuflow.environments.definition import DEFAULT, Definition, UnknownEnvironment, Variant, load, names
from gpuflow.environments.installing import Progress
from gpuflow.environments.places import Place
from gpuflow.environments.standing import (
    Ready,
    Standing,
    examine,
    find,
    note_problem,
    python_of,
    removable,
    standings,
    working,
)
from gpuflow.environments.states import Snapshot, snapshot

__all__ = [
    "DEFAULT",
    "Built",
    "ChosenEnvironment",
    "Definition",
    "Place",
    "Progress",
    "Ready",
    "Snapshot",
    "Standing",
    "State",
    "UnknownEnvironment",
    "Variant",
    "choose",
    "create",
    "examine",
    "find",
    "load",
    "names",
    "note_problem",
    "offers_of",
    "python_of",
    "removable",
    "snapshot",
    "standings",
    "working",
]
