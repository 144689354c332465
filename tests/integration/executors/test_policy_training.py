"""The task type ppo on a tiny model, by the TRL of configs/environments/ppo.yaml."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.fixtures.executor_child import ROOT, Child, request_json
from tests.fixtures.tiny_model import PAIRS

pytestmark = pytest.mark.ml

SPEC = {
    "data": {"type": "prompts", "prompts": [pair["prompt"] for pair in PAIRS[:8]]},
    "training": {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "num_ppo_epochs": 2,
        "max_prompt_length": 8,
        "learning_rate": 1e-3,
        "seed": 1,
    },
    "generation": {"max_new_tokens": 6, "temperature": 1.0, "do_sample": True},
    "reward_model": {"type": "function", "identifier": "distinct_words"},
}


@pytest.fixture
def overlay() -> Path:
    """The folder that holds the TRL of the environment ppo and nothing else; tox puts it there."""
    folder = Path(os.environ.get("PPO_TRL", "/nowhere"))
    if not (folder / "trl").is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail("PPO_TRL names no folder with TRL; run this by tox -e ml")
        pytest.skip("PPO_TRL names no folder with TRL; tox -e ml makes it")
    return folder


def test_the_folder_holds_the_pin_of_the_environment(overlay):
    variants = yaml.safe_load((ROOT / "configs" / "environments" / "ppo.yaml").read_text("utf-8"))["variants"]
    (pin,) = [pin for pin in variants["cpu"]["steps"][1] if pin.startswith("trl==")]

    assert [path.name for path in overlay.glob("trl-*.dist-info")] == [f"trl-{pin[5:]}.dist-info"]


def scoring(model: Path, folder: Path) -> str:
    """Return the folder of a model that scores: the tiny one with a head of one output."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    made = folder / "reward"
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(made)
    AutoTokenizer.from_pretrained(model).save_pretrained(made)
    return str(made)


@pytest.mark.parametrize("kind", ["function", "model"])
def test_ppo_trains_and_its_model_answers(overlay, run, tmp_path, tiny_model, kind):
    spec = {**SPEC, "taskType": "ppo", "model": {"source": {"type": "local", "identifier": str(tiny_model)}}}
    if kind == "model":
        spec |= {"reward_model": {"type": "model", "path": scoring(tiny_model, tmp_path)}, "lora": {"r": 2}}
    path = os.pathsep.join([str(overlay), str(ROOT)])
    child = Child(request_json("ppo", spec, tmp_path / "tune"), {"PYTHONPATH": path})

    try:
        ended = child.end()
    finally:
        child.close()

    saved = "final_model" if kind == "function" else "final_lora"
    assert (ended.result["steps"], ended.result[saved]) == (3, saved)
    told = [one["metrics"] for one in ended.named("progress") if one["metrics"]]
    assert len(told) == 3
    assert all({"loss", "reward", "kl"} <= set(one) for one in told)
    if kind == "function":
        assert all(0 < one["reward"] <= 1 for one in told)
        ask = {"data": {"type": "list", "items": ["Where?"]}, "inference": {"temperature": 0, "max_tokens": 2}}
        asked = run("inference", ask, out="ask", checkpoint_path=str(tmp_path / "tune" / "final_model"))
        assert len(asked.result["items"]) == 1


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"reward_model": None}, "ppo needs a reward"),
        ({"generation": {"top_p": 0.5}}, "generation.top_p is 0.5"),
        ({"data": {**SPEC["data"], "eval_split": 0.5}}, "PPO evaluates nothing"),
        ({"reward_model": {"type": "function", "identifier": "exact_match"}}, "ppo hands on no other columns"),
    ],
)
def test_what_ppo_cannot_do_is_said_first(run, spec, says):
    ended = run("ppo", {**SPEC, **spec})

    assert ended.error["type"] == "BadInput"
    assert says in ended.error["message"]
