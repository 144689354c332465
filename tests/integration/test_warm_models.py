"""Warm sessions with a real model: a tiny random Llama on transformers, through a real worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.client import Task, submit
from gpuflow.errors import TaskFailed
from gpuflow.serving.models import ServedModel, served_spec
from gpuflow.serving.replicas import Replicas
from gpuflow.serving.store import ServedModels
from tests.fixtures.tiny_model import make_tiny_model
from tests.support.boxes import Box
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

pytestmark = pytest.mark.ml
#: Calls to two models that share one GPU; each loads its model again. WARM_TURNS chooses more.
TURNS = int(os.environ.get("WARM_TURNS", "6"))
PROMPTS = ["one two", "three four five", "a", "the quick brown fox"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def spec(model: Path, prompt: str, **inference: Any) -> dict[str, Any]:
    return {
        "taskType": "inference",
        "engine": "transformers",
        "model": {"source": {"type": "local", "identifier": str(model)}, "transformers": {"dtype": "float32"}},
        "data": {"type": "list", "items": [prompt]},
        "inference": {"max_tokens": 12, "temperature": 0, **inference},
        "resources": {"hardware": {"gpu": {"count": 0}}},
    }


def outputs(tasks: list[Task]) -> list[str]:
    return [task.get(timeout=patient(120))["items"][0]["output"] for task in tasks]


def opened(worker: WorkerProcess) -> int:
    return worker.log().count("event=session_opened")


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line; of one that has ended, waited for or not, none."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_answers_of_a_warm_model_are_those_of_a_child_of_its_own(fleet: TestFleet, model: Path, tmp_path: Path) -> None:
    state = {"GPUFLOW_STATE_DIR": str(tmp_path / "state")}
    cold = fleet.start_worker("cold", env={**state, "GPUFLOW_SESSION_IDLE_SEC": "0"})
    expected = outputs([submit(spec(model, prompt), app=fleet.app) for prompt in PROMPTS[:2]])
    cold.stop()
    warm = fleet.start_worker("warm", env=state)

    alone = outputs([submit(spec(model, prompt), app=fleet.app) for prompt in PROMPTS[:2]])
    many = [submit(spec(model, prompt), app=fleet.app) for prompt in PROMPTS * 12]

    assert alone == expected
    assert outputs(many)[:2] == expected
    assert outputs(many) == outputs(many[:4]) * 12
    assert {task.get()["engine"] for task in many} == {"transformers"}
    assert (opened(cold), opened(warm)) == (0, 1), "50 calls, one load"

    # a stream tells its text as it is made, and a bad request is one task's own
    streamed = submit(spec(model, PROMPTS[0], stream=True), app=fleet.app)
    deltas = [event.data["delta"] for event in streamed.events() if event.name == "text_delta"]
    assert "".join(deltas) == streamed.get()["items"][0]["output"]
    with pytest.raises(TaskFailed):
        submit({**spec(model, "x"), "data": {"type": "jsonl", "path": "/nowhere.jsonl"}}, app=fleet.app).get(
            timeout=patient(60)
        )
    assert outputs([submit(spec(model, PROMPTS[0]), app=fleet.app)]) == expected[:1]
    assert opened(warm) == 1


def test_two_models_take_turns_on_one_gpu(fleet: TestFleet, model: Path, tmp_path: Path) -> None:
    models = [model, make_tiny_model(tmp_path / "other", seed=1)]
    with Box(fleet, "small", "1xA100-80GB") as box:
        worker = box.start("w1", GPUFLOW_STATE_DIR=str(tmp_path / "state"))
        answers: list[set[str]] = [set(), set()]
        for turn in range(TURNS):
            asked = spec(models[turn % 2], PROMPTS[0])
            asked["resources"] = {"accelerators": "A100:1", "labels": {"box": "small"}}
            task = submit(asked, app=fleet.app)
            answers[turn % 2] |= set(outputs([task]))
            assert task.get()["engine"] == "transformers"

        assert [len(found) for found in answers] == [1, 1]
        assert answers[0] != answers[1]
        assert opened(worker) == TURNS
        assert worker.log().count("event=session_evicted") == TURNS - 1
        # the GPU is free for what comes next, so nothing of the last session is left on it
        assert box.submit("A100:1").get(timeout=patient(60))["gpus"]
        assert not [child for child in worker.children() if "session" in words_of(child)]


def test_a_served_model_is_loaded_once_and_stays(fleet: TestFleet, model: Path, tmp_path: Path) -> None:
    worker = fleet.start_worker(
        "w1", env={"GPUFLOW_STATE_DIR": str(tmp_path / "state"), "GPUFLOW_SESSION_IDLE_SEC": "1"}
    )
    loaded = {name: part for name, part in spec(model, "").items() if name not in ("data", "inference")}
    served = ServedModel(name="tiny", spec=served_spec(loaded))
    replicas = Replicas(fleet.app)
    ServedModels(fleet.app.redis, fleet.app.keys).serve(served)
    replicas.reconcile(wait=True)
    eventually(lambda: replicas.statuses()[0].warm, within=120, what="the model loaded")

    calls = [
        {
            "taskType": "inference",
            "data": spec(model, prompt)["data"],
            "inference": {"max_tokens": 12, "temperature": 0},
        }
        for prompt in PROMPTS
    ]
    answers = outputs([submit(served.call_spec(call), app=fleet.app) for call in calls])

    assert all(answers)
    assert opened(worker) == 1
    assert ServedModels(fleet.app.redis, fleet.app.keys).stop("tiny")
    replicas.reconcile(wait=True)
    eventually(lambda: "event=session_ended" in worker.log(), what="the end of its session")
