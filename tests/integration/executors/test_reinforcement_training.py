"""The task types reward and grpo on a tiny model: a scorer is trained, and used; answers become what is rewarded."""

from __future__ import annotations

import io

import pytest

from executors.base import ExecutorError
from executors.modeling.location import local
from executors.training import rewards
from gpuflow.protocol import Emitter, Request
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


def classifier(folder, tiny_model, *names):
    """Return the folder of a classifier with classes of these names, and random weights."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    labels = dict(enumerate(names))
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_model, num_labels=len(names), id2label=labels, label2id={name: index for index, name in labels.items()}
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def test_a_sentiment_may_be_scored_by_how_far_its_classes_lie_apart(tmp_path, tiny_model):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    scorer = classifier(tmp_path / "three", tiny_model, "negative", "neutral", "positive")
    texts = ["The red car is here.", "The blue lamp is gone.", "Hello"]
    found = {}
    for score in ("margin", "probability"):
        section = {"type": "sentiment", "path": str(scorer), "score": score}
        request = Request(task_id="t", task_type="grpo", spec={"reward_model": section}, output_dir=str(tmp_path))
        reward, _ = rewards.load_reward(request, Emitter(io.StringIO()))
        found[score] = reward(prompts=[""] * 3, completions=texts)

    model = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    with torch.inference_mode():
        logits = model(**batch).logits
    assert found["margin"] == pytest.approx((logits[:, 2] - logits[:, 0]).tolist(), abs=1e-5)
    assert found["probability"] == pytest.approx(logits.softmax(-1)[:, 2].tolist(), abs=1e-5)


def test_a_margin_needs_a_negative_class(run, tmp_path, tiny_model):
    scorer = classifier(tmp_path / "odd", tiny_model, "other", "positive")
    reward = {"type": "sentiment", "path": str(scorer), "score": "margin"}
    data = {"type": "prompts", "prompts": PROMPTS}
    ended = run("grpo", {"data": data, "training": {**GRPO, "max_steps": 1}, "reward_model": reward})

    assert ended.error["type"] == "BadInput"
    assert "has no negative class (other, positive)" in ended.error["message"]


def test_prompts_are_cut_where_a_task_says_so(tiny_model):
    from transformers import AutoTokenizer

    from executors.training.scoring import padded_prompts

    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    prompts = ["Where is the red car?", "Where?"]
    whole, width = padded_prompts(prompts, tokenizer)
    cut, shorter = padded_prompts(prompts, tokenizer, longest=4)

    assert width > 4 == shorter
    assert cut[0]["input_ids"] == whole[0]["input_ids"][:4]
    assert {len(row["input_ids"]) for row in cut} == {4}


def test_grpo_by_sentiment(run, tmp_path, tiny_model):
    scorer = classifier(tmp_path / "sentiment", tiny_model, "NEGATIVE", "POSITIVE")
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
