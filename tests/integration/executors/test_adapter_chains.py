"""A training that begins from an adapter: the adapter that it leaves holds what both trainings have taught."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.ml

TRAINING = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "max_length": 64, "seed": 1}
#: A step that changes nothing that can be seen.
STILL = {**TRAINING, "max_steps": 1, "learning_rate": 1e-12}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
PREFERENCES = {
    "type": "preferences",
    "preferences": [{"prompt": f"Where is {n}?", "chosen": "Here.", "rejected": "Gone."} for n in range(8)],
}


@pytest.fixture
def first(run, tmp_path, pairs):
    """The result of a first training, and the folder of its adapter."""
    result = run("lora_sft", {"data": pairs, "training": TRAINING, "lora": LORA}, out="first").result
    return result, tmp_path / "first" / "final_lora"


def _weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def _assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert weight.sub(other[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize("lora", [LORA, {}], ids=["as_before", "left_out"])
def test_the_adapter_of_a_checkpoint_is_trained_on(run, tmp_path, pairs, first, tiny_model, lora):
    before, folder = first

    second = run(
        "lora_sft", {"data": pairs, "training": STILL, "lora": lora}, out="second", checkpoint_path=str(folder)
    )

    left = tmp_path / "second" / "final_lora"
    assert second.result["eval_loss_before"] == pytest.approx(before["eval_loss_after"], rel=0.02)
    _assert_same_weights(_weights(left), _weights(folder))
    assert json.loads((left / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_model)

    further = run("lora_sft", {"data": pairs, "training": TRAINING}, out="further", checkpoint_path=str(left))
    assert further.result["eval_loss_after"] < before["eval_loss_after"]


def test_one_that_goes_on_resumes_as_one_that_was_not_interrupted(run, tmp_path, pairs, first):
    _, folder = first
    spec = {"data": pairs, "training": {**TRAINING, "max_steps": 6, "save_steps": 3, "save_total_limit": 5}}

    whole = run(
        "lora_sft", spec, out="whole", checkpoint_path=str(folder), checkpoint_dir=str(tmp_path / "checkpoints")
    )
    resumed = run(
        "lora_sft",
        spec,
        out="again",
        checkpoint_path=str(folder),
        checkpoint_dir=str(tmp_path / "more"),
        resume_from=whole.result["checkpoints"][0],
    )

    assert resumed.result["resumed_from_step"] == 3
    assert resumed.result["eval_loss_after"] == pytest.approx(whole.result["eval_loss_after"], rel=1e-4)


def test_preferences_are_trained_into_the_adapter_that_was_given(run, tmp_path, first):
    _, folder = first

    second = run("dpo", {"data": PREFERENCES, "training": STILL, "lora": LORA}, out="dpo", checkpoint_path=str(folder))

    assert second.result["final_lora"] == "final_lora"
    left = tmp_path / "dpo" / "final_lora"
    _assert_same_weights(_weights(left), _weights(folder))
    assert not (left / "ref").exists()


def test_rewards_train_the_adapter_that_was_given_and_hold_it_to_its_beginning(run, tmp_path, first, monkeypatch):
    from executors.training import rewards

    _, folder = first
    monkeypatch.setitem(rewards.FUNCTIONS, "short", lambda prompts, completions, **_: [-len(c) for c in completions])
    spec = {
        "data": {"type": "prompts", "prompts": ["Where is it?"] * 4},
        "training": {
            **{name: STILL[name] for name in ("max_steps", "learning_rate", "seed")},
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "beta": 0.1,
        },
        "generation": {"max_new_tokens": 4},
        "reward_model": {"type": "function", "identifier": "short"},
        "lora": LORA,
    }

    ended = run("grpo", spec, out="grpo", checkpoint_path=str(folder))

    assert ended.result["final_lora"] == "final_lora"
    _assert_same_weights(_weights(tmp_path / "grpo" / "final_lora"), _weights(folder))
    kl = [event["metrics"]["kl"] for event in ended.named("progress") if "kl" in event["metrics"]]
    assert kl == [pytest.approx(0, abs=1e-4)]  # not the distance to the model without the adapter


def test_an_adapter_that_is_merged_first_leaves_a_whole_model(run, tmp_path, pairs, first):
    before, folder = first
    begin = {"load": {"path": str(folder)}, "merge_first": True}
    spec = {"data": pairs, "lora": {**LORA, "r": 4}, "checkpoint": begin}

    second = run(
        "lora_sft", {**spec, "training": {**STILL, "merge_adapter": True}}, out="second", checkpoint_path=str(folder)
    )

    assert second.result["final_model"] == "final_model"
    assert second.result["eval_loss_after"] == pytest.approx(before["eval_loss_after"], rel=0.02)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora": {**LORA, "r": 4}}, "lora.r is 4, and the adapter that this training goes on with has 8"),
        ({"lora": {**LORA, "target_modules": ["q_proj"]}}, "lora.target_modules is"),
        ({"checkpoint": {"merge_first": True}}, "final_lora/ would lack what it was trained on; set training.merge_ad"),
        ({"model": {"adapters": ["again"]}}, "of 2 adapters none can be trained on"),
    ],
    ids=["rank", "modules", "merged", "two"],
)
def test_a_result_that_would_lack_its_past_is_refused_before_the_model_loads(run, pairs, first, changes, says):
    _, folder = first
    if "model" in changes:
        changes = {"model": {"adapters": [{"type": "lora", "path": str(folder)}]}}

    ended = run("lora_sft", {"data": pairs, "training": STILL, "lora": LORA, **changes}, checkpoint_path=str(folder))

    assert (ended.code, ended.error["type"]) == (1, "BadInput")
    assert says in ended.error["message"]


def test_an_adapter_with_a_weight_is_not_trained_on(run, pairs, first):
    _, folder = first
    model = {"adapters": [{"type": "lora", "path": str(folder), "weight": 0.5}]}
    spec = {"data": pairs, "training": STILL, "lora": LORA, "model": model}

    assert "an adapter with weight 0.5" in run("lora_sft", spec).error["message"]
    whole = run("lora_sft", {**spec, "training": {**STILL, "merge_adapter": True}}, out="whole")
    assert whole.result["final_model"] == "final_model"


def test_merge_first_needs_an_adapter(run, pairs, tiny_model):
    begin = {"load": {"path": str(tiny_model)}, "merge_first": True}

    ended = run("sft", {"data": pairs, "training": STILL, "checkpoint": begin}, checkpoint_path=str(tiny_model))

    assert "begins from none" in ended.error["message"]
