"""A child of its own on vLLM keeps the contract of an executor, as those of tests/conformance do.

That no process of a run is left is checked with each run (tests/conformance/runs.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import cases
from tests.conformance.providers import PROVIDERS, ROOT
from tests.conformance.runs import Runs
from tests.vllm.conftest import EXACT, VllmEnvironment

pytestmark = pytest.mark.vllm

(INFERENCE,) = (one for one in PROVIDERS if one.task_type == "inference")
#: Those of one load of the engine; bad input, merged calls and signals are in test_alone_vllm.
CASES = (cases.start, cases.progress, cases.result, cases.garbage_on_stdout)


def _on_vllm(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "model": {**spec["model"], "vllm": EXACT}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, environment: VllmEnvironment, tiny: Path) -> Runs:
    good, bad = INFERENCE.good, INFERENCE.bad
    provider = replace(INFERENCE, good=lambda model: _on_vllm(good(model)), bad=lambda model: _on_vllm(bad(model)))
    path = os.pathsep.join([environment.variables["PYTHONPATH"], str(ROOT)])
    variables = {**environment.variables, "PYTHONPATH": path, "GPUFLOW_ENGINE": "vllm"}
    return Runs(provider, tmp_path_factory.mktemp("vllm"), tiny / "model", environment.python, variables)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Callable[[Runs], None], runs: Runs) -> None:
    case(runs)
