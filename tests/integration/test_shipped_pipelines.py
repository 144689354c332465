"""The shipped pipelines that train and retrieve run from their YAML as it is, to real weights and answers.

Their model presets are in the cache already, as if they had been pulled: a tiny model stands for each of them.
Those that need no torch run in test_examples; `rag` with its real models, and the quick start, in tests/e2e.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from executors.modeling.presets import prepared_folder
from gpuflow.client import PipelineRun, submit_pipeline
from gpuflow.spec.presets import load_preset
from tests.fixtures.fleets import OPTIONS
from tests.fixtures.tiny_model import make_tiny_model
from tests.support.engines import build
from tests.support.fleet import TestFleet
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import patient

pytestmark = [pytest.mark.ml, pytest.mark.timeout(400)]

CHAT, EMBEDDING = "smollm2-135m-instruct", "all-minilm-l6-v2"
#: Those that run on one fleet, all at once, so that the trainers' libraries load beside each other.
ON_A_FLEET = ("train-lora", "train-dpo", "train-grpo", "train-ppo", "rag", "inference", "embedding")
#: Stage -> the machine that runs it: a reward that is trained on one scores on the other.
PLACES = {"train-grpo": {"score": "one", "tune": "two"}}
STEPS = 2


def prepare_presets(cache: Path) -> Path:
    """Prepare both presets in a cache; return the folder of the chat model."""
    for preset in (EMBEDDING, CHAT):
        place = prepared_folder(preset, load_preset("models", preset), str(cache))
        folder = make_tiny_model(place, positions=1024)
    return folder


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment ppo: this Python, with the TRL that has PPO before its own, where tox -e ml has put that."""
    folder = tmp_path_factory.mktemp("environments")
    overlay = Path(os.environ.get("PPO_TRL", "/nowhere"))
    if (overlay / "trl").is_dir():
        script = f'#!/bin/sh\nexport PYTHONPATH="{overlay}:$PYTHONPATH"\nexec {sys.executable} "$@"\n'
        build(folder, script, name="ppo")
    return folder


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory, environments: Path) -> Iterator[Callable[[str], PipelineRun]]:
    """Return a pipeline of the fleet when it has ended; all of them were submitted at the start.

    Its two machines share no disk: what goes from stage to stage goes by the fleet's store.
    """
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "gateway").mkdir()
    with Gateway(folder / "gateway") as gateway:
        store = {"GPUFLOW_STORE_URL": gateway.results_url, "GPUFLOW_WORKER_TOKEN": TOKEN}
        fleet = TestFleet(folder, env=store, options=OPTIONS)
        try:
            for name in ("one", "two"):
                own = {"RESULTS_DIR": str(folder / name), "GPUFLOW_CACHE_DIR": str(folder / f"{name}-cache")}
                prepare_presets(folder / f"{name}-cache")
                env = {**own, "GPUFLOW_ENV_DIR": str(environments), "HF_HUB_OFFLINE": "1"}
                fleet.spawn_worker(name, "--label", f"box={name}", "--max-jobs", "1", env=env)
            runs = {name: submit_pipeline(_placed(name), app=fleet.app) for name in ON_A_FLEET if _can_run(name)}
            yield lambda name: runs[name].wait(timeout=patient(300))
        finally:
            fleet.close()


def _placed(name: str) -> dict[str, Any]:
    """Return a shipped pipeline as it is, but for the machine of some stages."""
    template = load_preset("pipelines", name)
    for node in template["spec"].get("graph", {}).get("nodes", ()):
        if place := PLACES.get(name, {}).get(node["name"]):
            node["spec"]["resources"] = {"labels": {"box": place}}
    return template


def _can_run(name: str) -> bool:
    return name != "train-ppo" or Path(os.environ.get("PPO_TRL", "/nowhere"), "trl").is_dir()


def trained(result: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the log of each step of a training, whose other files are there too."""
    folder = Path(result["result_dir"])
    assert result["steps"] == STEPS
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    manifest = {entry["name"] for entry in json.loads((folder / "manifest.json").read_text())["artifacts"]}
    assert {"responses.json", "loss.png"} <= manifest
    history: list[dict[str, float]] = json.loads((folder / "responses.json").read_text())["history"]
    steps = [log for log in history if "loss" in log]
    assert [log["step"] for log in steps] == list(range(1, STEPS + 1))
    return steps


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    assert found, f"{folder} holds no weights"
    return found


def adapter(result: Mapping[str, Any]) -> None:
    """Check the adapter of a training: for the model of the template, and no more what it began with."""
    folder = Path(result["final_lora_path"])
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (Path(config["base_model_name_or_path"]) / "config.json").is_file()
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    moved = [name for name, tensor in weights(folder).items() if "lora_B" in name and tensor.abs().max() > 0]
    assert moved, "every lora_B is zero, as it was before the training"
    assert Path(result["final_lora_archive"]).is_file()


def test_train_sft_by_the_command_line(tmp_path: Path) -> None:
    model = prepare_presets(tmp_path / "cache")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLOW_", "XDG_"))}
    kept.pop("REDIS_URL", None)
    done = subprocess.run(
        [sys.executable, "-c", "from gpuflow.cli import main; main()", "run", "train-sft", "--json"],
        env={**kept, "HOME": str(tmp_path), "GPUFLOW_CACHE_DIR": str(tmp_path / "cache"), "GPUFLOW_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(300),
    )

    assert done.returncode == 0, done.stderr[-3000:]
    tune, ask = (stage["result"] for stage in json.loads(done.stdout)["stages"])
    assert all(log["loss"] > 0 for log in trained(tune))
    before, after = weights(model), weights(Path(tune["final_model_path"]))
    assert set(after) == set(before)
    assert [name for name in before if not after[name].equal(before[name])], "no weight has changed"
    (answer,) = ask["items"]
    assert (answer["input"], ask["usage"]["completion_tokens"] > 0) == ("Where is the red lamp?", True)


def test_train_lora_continues_its_adapter_and_answers_with_it(run_of: Callable[[str], PipelineRun]) -> None:
    run = run_of("train-lora")
    first, second, ask = (run[name].result for name in ("colours", "houses", "ask"))

    for result in (first, second):
        trained(result)
        adapter(result)
    before, after = (weights(Path(result["final_lora_path"])) for result in (first, second))
    moved = [name for name in before if "lora_B" in name and not before[name].equal(after[name])]
    assert set(before) == set(after) and moved, "the second training has changed nothing"
    (answer,) = ask["items"]
    assert answer["input"] == "Where is the red lamp?"
    assert ask["usage"]["completion_tokens"] > 0


def test_train_dpo(run_of: Callable[[str], PipelineRun]) -> None:
    result = run_of("train-dpo")["tune"].result

    steps = trained(result)
    assert all({"rewards/accuracies", "rewards/margins"} <= set(log) for log in steps)
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "the policy begins as its reference: -log(1/2)"
    adapter(result)


def test_train_grpo_with_the_reward_that_its_first_stage_has_trained(run_of: Callable[[str], PipelineRun]) -> None:
    run = run_of("train-grpo")
    score, tune = run["score"].result, run["tune"].result

    trained(score)
    assert score["final_model_archive_url"].startswith("http://")
    config = json.loads(Path(score["final_model_path"], "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert all(isinstance(log["reward"], float) for log in trained(tune))
    adapter(tune)


def test_train_ppo(run_of: Callable[[str], PipelineRun]) -> None:
    if not _can_run("train-ppo"):
        if os.environ.get("CI") == "true":
            pytest.fail("PPO_TRL names no folder with TRL; run this by tox -e ml")
        pytest.skip("PPO_TRL names no folder with TRL; tox -e ml makes it")

    result = run_of("train-ppo")["tune"].result

    steps = trained(result)
    assert all(0 < log["reward"] <= 1 and {"kl", "value_loss"} <= set(log) for log in steps)
    adapter(result)


def test_rag(run_of: Callable[[str], PipelineRun]) -> None:
    run = run_of("rag")
    index, ask = run["index"].result, run["ask"].result

    assert (index["documents"], index["dimensions"], index["embedding_model"]) == (6, 128, EMBEDDING)
    assert Path(index["final_index_archive"]).is_file()
    sources = {"opening-hours", "cards", "loans", "fines", "rooms", "printing"}
    assert [len(item["citations"]) for item in ask["items"]] == [2] * 3
    assert {one["source"] for item in ask["items"] for one in item["citations"]} <= sources
    assert ask["usage"]["completion_tokens"] > 0


def test_inference(run_of: Callable[[str], PipelineRun]) -> None:
    result = run_of("inference")["inference"].result

    assert [item["index"] for item in result["items"]] == [0, 1]
    assert 0 < result["usage"]["completion_tokens"] <= 2 * 24


def test_embedding(run_of: Callable[[str], PipelineRun]) -> None:
    result = run_of("embedding")["embedding"].result

    assert [item["input"] for item in result["items"]] == ["a red car", "a blue automobile", "the price of bread"]
    assert result["dimensions"] == 128
    assert all(item["embedding"] for item in result["items"])
