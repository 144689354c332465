"""vLLM through a real worker: SmolLM2 token by token, and the end of an engine in the middle of a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.client import Task, submit
from gpuflow.settings import Settings
from tests.fixtures.fleets import OPTIONS
from tests.fixtures.session_child import Caller, SessionChild, outputs
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient
from tests.vllm.conftest import EXACT, VllmEnvironment

pytestmark = pytest.mark.vllm

PROMPTS = ["What is the capital of France?", "Write one sentence about the sea.", "Count from one to five."]
SMOLLM2 = {"type": "preset", "identifier": "smollm2-135m-instruct"}
#: An engine starts within this time on a busy machine of two cores.
START_SECONDS = 400


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def vllm_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    made = TestFleet(tmp_path_factory.mktemp("fleet"), options=OPTIONS)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def worker(vllm_fleet: TestFleet, cache: Path) -> WorkerProcess:
    """A worker with the environment."""
    variables = {
        "GPUFLOW_ENV_DIR": str(Settings.load().env_dir),
        "GPUFLOW_CACHE_DIR": str(cache),
        "GPUFLOW_STATE_DIR": str(cache / "state"),
    }
    return vllm_fleet.start_worker("w1", env=variables)


def ask(source: dict[str, str], prompt: str, **inference: Any) -> dict[str, Any]:
    return {
        "taskType": "inference",
        "engine": "vllm",
        "model": {"source": source, "vllm": {**EXACT, "max_model_len": 256}},
        "data": {"type": "list", "items": [prompt]},
        "inference": {"temperature": 0, "max_tokens": 24, **inference},
        "retry": {"backoff_seconds": 0},
        "resources": {"hardware": {"gpu": {"count": 0}}},
    }


def opened(worker: WorkerProcess) -> int:
    return worker.log().count("event=session_opened")


def test_smollm2_answers_as_transformers_does_token_by_token(
    vllm_fleet: TestFleet, worker: WorkerProcess, environment: VllmEnvironment, cache: Path, tmp_path: Path
) -> None:
    first = submit(ask(SMOLLM2, PROMPTS[0]), app=vllm_fleet.app).get(timeout=patient(START_SECONDS))
    loads = opened(worker)
    tasks = [submit(ask(SMOLLM2, prompt), app=vllm_fleet.app) for prompt in PROMPTS]
    answers = [task.get(timeout=patient(120)) for task in tasks]

    with SessionChild(tmp_path / "session.log", environment.python, environment.variables) as session:
        model = {"source": SMOLLM2, "transformers": {"dtype": "float32"}}
        spec = {"taskType": "inference", "model": model}
        session.send("open", engine="transformers", spec=spec, gpus=[], cache_dir=str(cache))
        session.until("ready")
        expected = Caller(session, tmp_path / "out").ask("all", *PROMPTS, max_tokens=24, batch_size=1)

    assert [answer["items"][0]["output"] for answer in answers] == outputs(expected)
    counts = [answer["usage"]["completion_tokens"] for answer in answers]
    assert counts == [item["usage"]["completion_tokens"] for item in expected["items"]]
    assert "Paris" in first["items"][0]["output"]
    assert {answer["engine"] for answer in answers} == {"vllm"}
    assert opened(worker) == loads


def newest_engine_core(worker: WorkerProcess) -> psutil.Process:
    """vLLM's own process, in which the model is, of the session that was opened last."""
    below = psutil.Process(worker.pid).children(recursive=True)
    found = [one for one in below if "EngineCore" in one.name() or "EngineCore" in " ".join(one.cmdline())]
    return max(found, key=lambda process: process.create_time())


def test_a_request_whose_engine_is_killed_is_answered_by_a_fresh_one(
    vllm_fleet: TestFleet, worker: WorkerProcess, tiny: Path
) -> None:
    submit(ask(SMOLLM2, PROMPTS[0]), app=vllm_fleet.app).get(timeout=patient(START_SECONDS))
    before = opened(worker)
    source = {"type": "local", "identifier": str(tiny / "model")}
    submit(ask(source, "Hello"), app=vllm_fleet.app).get(timeout=patient(START_SECONDS))
    core = newest_engine_core(worker)
    core.suspend()  # so that it is killed before its answer, however fast it is
    task = submit(ask(source, "Tell me"), app=vllm_fleet.app)
    run = Task(str(task.record().run), vllm_fleet.app)  # that of a greedy call
    eventually(lambda: run.state == "RUNNING", what="the request to be open")

    core.kill()

    result = task.get(timeout=patient(START_SECONDS))
    assert result["usage"]["completion_tokens"] > 0
    assert (task.record().attempt, run.record().failures) == (2, 1)
    assert [entry.outcome for entry in vllm_fleet.app.ledger.attempts(task.id)] == ["failed", "succeeded"]
    assert opened(worker) == before + 2
    # the session of the other model went on
    assert submit(ask(SMOLLM2, PROMPTS[0]), app=vllm_fleet.app).get(timeout=patient(60))["items"]
    assert opened(worker) == before + 2
