"""A child of its own on vLLM: what a worker starts where it keeps no session, and `gpuflow executor run`.

It keeps the contract of an executor, as those of tests/conformance do; that no process of a run is left is checked with
each run there (tests/conformance/runs.py). That it answers as transformers does says that it answers as a session does,
too (test_session_vllm).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.protocol import Event, Request
from gpuflow.settings import Settings
from gpuflow.worker.standalone import Ended, Standalone, environment_for
from tests.conformance import cases
from tests.conformance.providers import PROVIDERS, ROOT
from tests.conformance.runs import Runs
from tests.fixtures.session_child import Caller, SessionChild, outputs
from tests.gate import leftovers
from tests.support.waiting import patient
from tests.vllm.conftest import EXACT, IN_CORE, VllmEnvironment

pytestmark = pytest.mark.vllm

(INFERENCE,) = (one for one in PROVIDERS if one.task_type == "inference")
#: Those of one load of the engine; bad input, merged calls and signals are below.
CASES = (cases.start, cases.progress, cases.result, cases.garbage_on_stdout)
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


class Alone:
    """Runs requests, and knows their events."""

    def __init__(self, environment: VllmEnvironment, tiny: Path, folder: Path) -> None:
        self._environment = environment
        self._model = tiny / "model"
        self._folder = folder
        self.events: list[Event] = []

    def run(self, spec: dict[str, Any], *, stop_at: str = "", **vllm: Any) -> Ended:
        model = {"source": {"type": "local", "identifier": str(self._model)}, "vllm": {**EXACT, **vllm}}
        request = Request(
            task_id="alone",
            task_type="inference",
            spec={"taskType": "inference", "model": model, **spec},
            output_dir=str(self._folder / "output"),
            cache_dir=str(self._folder / "cache"),
        )
        variables = environment_for(request, Settings(pass_env=(leftovers.VARIABLE,))) | self._environment.variables
        variables |= {"GPUFLOW_ENGINE": "vllm", "CUDA_VISIBLE_DEVICES": ""}

        def on_event(event: Event) -> None:
            self.events.append(event)
            if stop_at and event.name == stop_at:
                runner.stop()

        argv = [self._environment.python, "-P", "-m", "executors"]
        runner = Standalone(request, environment=variables, argv=argv, on_event=on_event, grace_seconds=patient(240))
        return runner.run()


@pytest.fixture
def alone(environment: VllmEnvironment, tiny: Path, tmp_path: Path) -> Alone:
    return Alone(environment, tiny, tmp_path)


def _on_vllm(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "model": {**spec["model"], "vllm": {**EXACT, **IN_CORE}}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, environment: VllmEnvironment, tiny: Path) -> Runs:
    good, bad = INFERENCE.good, INFERENCE.bad
    provider = replace(INFERENCE, good=lambda model: _on_vllm(good(model)), bad=lambda model: _on_vllm(bad(model)))
    path = os.pathsep.join([environment.variables["PYTHONPATH"], str(ROOT)])
    variables = {**environment.variables, "PYTHONPATH": path, "GPUFLOW_ENGINE": "vllm"}
    return Runs(provider, tmp_path_factory.mktemp("vllm"), tiny / "model", environment.python, variables)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Callable[[Runs], None], runs: Runs) -> None:
    case(runs)


def test_it_answers_as_transformers_does(runs: Runs, reference: SessionChild, tmp_path: Path) -> None:
    good = runs.good()

    ended = cases.normal(runs).ended

    assert ended.completed, ended.error
    assert ended.result["engine"] == "vllm"
    told = Caller(reference, tmp_path / "transformers").ask("same", *good["data"]["items"], **good["inference"])
    assert outputs(ended.result) == outputs(told)


def test_merged_calls_share_one_load_and_a_bad_one_fails_alone(
    alone: Alone, reference: SessionChild, tmp_path: Path
) -> None:
    def child(name: str, **inference: Any) -> dict[str, Any]:
        data = {"type": "list", "items": [f"Hello {name}"]}
        return {"id": name, "spec": {"data": data, "inference": {**GREEDY, **inference}}}

    ended = alone.run({"merge_children": [child("ana"), child("bo", top_p=7), child("cy", max_tokens=3)]}, **IN_CORE)

    assert ended.completed, ended.error
    children = ended.result["children"]
    assert children["bo"]["error"]["type"] == "BadInput"
    assert children["ana"]["usage"]["completion_tokens"] == 6
    assert children["cy"]["usage"]["completion_tokens"] == 3
    told = Caller(reference, tmp_path / "transformers").ask("ana", "Hello ana", **GREEDY)
    assert outputs(children["ana"]) == outputs(told)
    loads = [event for event in alone.events if event.data.get("message") == "loading the model"]
    assert len(loads) == 1


def test_a_cancel_in_the_middle_leaves_no_process(alone: Alone) -> None:
    long = {"temperature": 0, "max_tokens": 1000, "ignore_eos": True, "stream": True}

    items = ["Hello Ana"] * 200
    ended = alone.run({"data": {"type": "list", "items": items}, "inference": long}, stop_at="text_delta")

    assert not ended.completed
    assert ended.error is not None and ended.error["type"] == "Cancelled"
    assert ended.end is not None and ended.end.exit_code == 143
    left = [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get("TASK_ID") == "alone"]
    assert left == []
