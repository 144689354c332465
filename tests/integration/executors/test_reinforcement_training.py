"""The task types reward and grpo on a tiny model: a scorer is trained, and used; answers become what is rewarded."""

from __future__ import annotations

import pytest

from executors.base import ExecutorError
from executors.modeling.location import local
from executors.training import rewards
from tests.fixtures.tiny_model import PAIRS

pytestmark = pytest.mark.ml

REWARD = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "max_length": 64, "seed": 1}
GRPO = {
    "max_steps": 10,
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "learning_rate": 1e-2,
    "seed": 1,
    "save_model": False,
}
SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}
PREFERENCES = [{"prompt": p["prompt"], "chosen": p["completion"], "rejected": "Hello Ana, gone."} for p in PAIRS]
PROMPTS = [pair["prompt"] for pair in PAIRS[:8]]


def test_a_reward_model_learns_and_scores_for_grpo(start, run, tmp_path):
    data = {"type": "preferences", "preferences": PREFERENCES, "eval_split": 0.2}
    trained = start("reward", {"data": data, "training": REWARD}, out="reward").end()

    assert trained.result["eval_loss_after"] < trained.result["eval_loss_before"] * 0.7
    accuracy = [one["metrics"]["accuracy"] for one in trained.named("progress") if "accuracy" in one["metrics"]]
    assert accuracy[-1] == 1.0
    assert "Traceback" not in trained.log
    scorer = {"type": "model", "path": str(tmp_path / "reward" / "final_model"), "weight": 0.5}
    spec = {
        "data": {"type": "prompts", "prompts": PROMPTS},
        "training": {**GRPO, "max_steps": 2},
        "generation": SAMPLING,
        "reward_model": scorer,
    }
    tuned = run("grpo", {**spec, "lora": {"r": 4, "target_modules": "all-linear"}}, out="grpo")
    assert tuned.result["steps"] == 2
    assert all("reward" in one["metrics"] for one in tuned.named("progress") if one["metrics"])


def test_a_model_without_a_head_scores_nothing(tiny_model):
    with pytest.raises(ExecutorError, match="has no head that scores"):
        rewards._check_head(local(tiny_model))


def test_a_reward_model_can_be_an_adapter(run, tmp_path):
    data = {"type": "preferences", "preferences": PREFERENCES[:4]}

    result = run("reward", {"data": data, "training": {**REWARD, "max_steps": 1}, "lora": {"r": 2}}).result

    assert result["final_lora"] == "final_lora"
    assert "SEQ_CLS" in (tmp_path / "out" / "final_lora" / "adapter_config.json").read_text()


def test_grpo_makes_the_answers_what_is_rewarded(run, monkeypatch):
    def vowels(prompts, completions, **columns):
        assert all(isinstance(one, str) for one in (*prompts, *completions))
        return [sum(letter in "aeiou" for letter in one) / max(len(one), 1) for one in completions]

    monkeypatch.setitem(rewards.FUNCTIONS, "vowels", vowels)
    spec = {
        "data": {"type": "prompts", "prompts": PROMPTS, "eval_split": 0.25},
        "training": {**GRPO, "max_steps": 16, "per_device_eval_batch_size": 8, "beta": 0.01},
        "generation": SAMPLING,
        "reward_model": {"type": "function", "identifier": "vowels"},
    }

    ended = run("grpo", spec)

    assert ended.result["eval_reward_after"] > ended.result["eval_reward_before"] * 1.1
    steps = [one for one in ended.named("progress") if "reward" in one["metrics"]]
    assert (steps[-1]["current"], steps[-1]["total"]) == (16, 16)


def test_grpo_by_sentiment(run, tmp_path, tiny_model):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    labels = {0: "NEGATIVE", 1: "POSITIVE"}
    scorer = tmp_path / "sentiment"
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_model, num_labels=2, id2label=labels, label2id={name: index for index, name in labels.items()}
    )
    model.save_pretrained(scorer)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(scorer)
    spec = {
        "data": {"type": "prompts", "prompts": PROMPTS},
        "training": {**GRPO, "max_steps": 1},
        "generation": SAMPLING,
        "reward_model": {"type": "sentiment", "identifier": str(scorer)},
    }

    reward = next(one["metrics"]["reward"] for one in run("grpo", spec).named("progress") if one["metrics"])

    assert 0 < reward < 1


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"reward_model": None}, "grpo needs a reward: reward_model"),
        ({"reward_model": {"type": "function", "identifier": "os.system"}}, "there is no reward function 'os.system'"),
        ({"reward_model": {"type": "function", "identifier": "exact_match"}}, "reads the column answer"),
        ({"generation": {"do_sample": False}}, "grpo compares different answers"),
        ({"generation": {"max_new_tokens": 4}, "training": {"max_completion_length": 8}}, "keep one of both"),
        ({"training": {"use_vllm": True}}, "training.use_vllm"),
        ({"data": {"type": "list", "items": [{"nothing": 1}]}}, "neither prompt nor messages"),
    ],
)
def test_what_cannot_work_is_said_before_the_model_loads(run, spec, says):
    full = {
        "data": {"type": "prompts", "prompts": PROMPTS},
        "reward_model": {"type": "function", "identifier": "brevity"},
        "model": {"source": {"type": "local", "identifier": "/nowhere"}},
        **spec,
    }

    ended = run("grpo", full)

    assert ended.error["type"] == "BadInput"
    assert says in ended.error["message"]
    assert ended.named("worker") == []


def test_functions_read_the_columns_of_the_data():
    given = {"answer": ["here", "gone"]}

    assert rewards.exact_match(["a", "b"], [" here ", "Gone"], **given) == [1.0, 0.0]
    assert rewards.contains_answer(["a", "b"], ["It is here.", "It is Gone."], **given) == [1.0, 1.0]
    assert rewards.distinct_words(["a"], ["to be or not to be"]) == [4 / 6]
    assert rewards.brevity(["a", "a"], ["", "x" * 100]) == [1.0, 0.5]
