"""The environment `vllm`, tiny models made in it (the tests' own may have no torch), and sessions that run in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.environments import find
from gpuflow.settings import Settings
from tests.fixtures.executor_child import ROOT
from tests.fixtures.session_child import SessionChild
from tests.gate import leftovers

#: Exact answers: no rounding of a shorter type, no compiled kernels.
EXACT = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 32}
_MAKE = """
import sys
from pathlib import Path
from tests.fixtures.tiny_adapter import make_tiny_adapter
from tests.fixtures.tiny_model import make_tiny_model
folder = Path(sys.argv[1])
model = make_tiny_model(folder / "model")
for number in (1, 2):
    make_tiny_adapter(model, folder / f"adapter-{number}", folder / f"merged-{number}", seed=number)
"""


class VllmEnvironment:
    """Its interpreter, and the variables of a child in it."""

    def __init__(self) -> None:
        ready = find(Settings.load(), "vllm")
        assert ready is not None, "there is no environment vllm; gpuflow env create vllm --variant cpu"
        self.python = str(ready.python)
        self.variables = {**ready.variables, "PYTHONPATH": ready.python_path or ""}


@pytest.fixture(scope="session")
def environment() -> VllmEnvironment:
    return VllmEnvironment()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, environment: VllmEnvironment) -> Path:
    """A folder with `model`, two adapters for it (`adapter-1`), and the model with each merged in (`merged-1`)."""
    folder = tmp_path_factory.mktemp("tiny")
    path = os.pathsep.join([environment.variables["PYTHONPATH"], str(ROOT)])
    command = [environment.python, "-P", "-c", _MAKE, str(folder)]
    subprocess.run(command, env={**os.environ, **environment.variables, "PYTHONPATH": path}, check=True)
    return folder


@pytest.fixture(scope="session")
def open_session(tmp_path_factory: pytest.TempPathFactory, environment: VllmEnvironment) -> Callable[..., SessionChild]:
    """Open a session in the environment; it is the caller's to end."""

    def start(
        model: Path | str, engine: str, task_type: str = "inference", spec: dict[str, Any] | None = None, **vllm: Any
    ) -> SessionChild:
        log = tmp_path_factory.mktemp("session") / "session.log"
        session = SessionChild(log, environment.python, environment.variables)
        section = {"source": {"type": "local", "identifier": str(model)}, "vllm": {**EXACT, **vllm}}
        session.send("open", engine=engine, spec={"taskType": task_type, "model": section, **(spec or {})}, gpus=[])
        return session

    return start


@pytest.fixture(scope="session")
def warm(open_session: Callable[..., SessionChild], tiny: Path) -> Iterator[SessionChild]:
    """A vLLM session with room for adapters, for the tests that leave it as it is."""
    with leftovers.kept_for_the_session():
        session = open_session(tiny / "model", "vllm", enable_lora=True, max_loras=2, max_lora_rank=8)
    with session:
        session.until("ready")
        yield session


@pytest.fixture(scope="session")
def reference(open_session: Callable[..., SessionChild], tiny: Path) -> Iterator[SessionChild]:
    """The same model on transformers, for what must be equal."""
    with leftovers.kept_for_the_session():
        session = open_session(tiny / "model", "transformers")
    with session:
        session.until("ready")
        yield session
