"""The environment `vllm`, tiny models made in it (the tests' own may have no torch), and sessions that run in it."""

from __future__ import annotations

import contextlib
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
#: The engine core runs the model itself, as it does on one GPU. On a CPU it has one more process for that, which loads
#: all of vLLM once more: a third of a start. For engines of which a test asks nothing but answers.
IN_CORE = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
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
def warm_session(open_session: Callable[..., SessionChild], tiny: Path) -> Iterator[Callable[[], SessionChild]]:
    """Return the vLLM session with room for adapters. A test that ends it leaves the next one a new one."""
    made: list[SessionChild] = []

    def session() -> SessionChild:
        if not made or made[-1].process.poll() is not None:
            with leftovers.kept_for_the_session():
                made.append(open_session(tiny / "model", "vllm", enable_lora=True, max_loras=2, max_lora_rank=8))
            stack.enter_context(made[-1])
            made[-1].until("ready")
        return made[-1]

    with contextlib.ExitStack() as stack:
        yield session


@pytest.fixture
def warm(warm_session: Callable[[], SessionChild]) -> SessionChild:
    """A vLLM session on which no request is open; what earlier ones have told is forgotten."""
    session = warm_session()
    session.forget()
    return session


@pytest.fixture(scope="session")
def reference_session(open_session: Callable[..., SessionChild], tiny: Path) -> Iterator[SessionChild]:
    """The same model on transformers."""
    with leftovers.kept_for_the_session():
        session = open_session(tiny / "model", "transformers")
    with session:
        session.until("ready")
        yield session


@pytest.fixture
def reference(reference_session: SessionChild) -> SessionChild:
    """The same for one test: what is right."""
    reference_session.forget()
    return reference_session
