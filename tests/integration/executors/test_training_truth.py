"""What a training says of itself: rows used and left out, settings, warnings; and what it refuses before it loads."""

from __future__ import annotations

import json

import pytest

from tests.fixtures.tiny_model import PAIRS

pytestmark = pytest.mark.ml

LORA = {"r": 4, "target_modules": "all-linear"}
TRAINING = {"max_steps": 1, "per_device_train_batch_size": 2, "max_length": 64, "save_model": False}
LONG = {"prompt": "Where is the red car? " * 20, "completion": "Here."}
EMPTY = {"prompt": "Where is it?", "completion": " "}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello Ana."}]}


def _list(rows, **extra):
    return {"type": "list", "items": list(rows), **extra}


@pytest.fixture
def unloaded(monkeypatch):
    """No model may be loaded in this test."""
    import executors.modeling.loading

    def refuse(*_args, **_options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(executors.modeling.loading, "load_model", refuse)


def test_rows_are_counted_with_the_reason(run):
    cut = {"prompt": "Where?", "completion": "The red car is here. " * 20}

    result = run(
        "lora_sft", {"data": _list([*PAIRS[:6], LONG, LONG, EMPTY, cut]), "training": TRAINING, "lora": LORA}
    ).result

    assert (result["rows"], result["rows_trained"], result["rows_evaluated"]) == (10, 7, 0)
    assert result["rows_dropped"] == {"empty": 1, "max_length": 2}
    assert result["rows_truncated"] == 1


@pytest.mark.parametrize(
    ("task_type", "rows", "training", "says"),
    [
        ("lora_sft", [LONG] * 3, {}, "3 of 3 rows have no completion left within training.max_length 64"),
        ("lora_sft", [EMPTY, EMPTY], {}, "all 2 rows are empty"),
        (
            "reward",
            [{"prompt": LONG["prompt"], "chosen": "Here.", "rejected": "Gone."}] * 2,
            {},
            "2 of 2 rows have an answer that is longer than training.max_length 64",
        ),
        ("lora_sft", [CHAT], {"assistant_only_loss": True}, "does not mark what the assistant says"),
        ("lora_sft", [{"text": "Hello."}], {"assistant_only_loss": True}, "the rows have text"),
        ("lora_sft", [CHAT], {"completion_only_loss": True}, "needs prompt and completion, and the rows have messages"),
        ("lora_sft", [{"text": "a", "body": "b"}], {"dataset_text_field": "boby"}, "columns found are: text, body"),
    ],
)
def test_what_cannot_be_trained_is_told_before_the_model_is_loaded(run, unloaded, task_type, rows, training, says):
    ended = run(task_type, {"data": _list(rows), "training": {**TRAINING, **training}, "lora": LORA})

    assert ended.error["type"] == "BadInput"
    assert says in ended.error["message"]


def test_the_column_of_the_texts_may_be_named_as_trl_does(run):
    rows = [{"text": " ", "body": "Hello Ana, the red car is here."}] * 2

    result = run(
        "lora_sft", {"data": _list(rows), "training": {**TRAINING, "dataset_text_field": "body"}, "lora": LORA}
    ).result

    assert (result["rows_trained"], result["rows_dropped"]) == (2, {})
    by_default = {**TRAINING, "dataset_text_field": "text"}
    chats = run("lora_sft", {"data": _list([CHAT] * 2), "training": by_default, "lora": LORA}, out="chats").result
    assert (chats["rows_trained"], chats["warnings"]) == (2, [])


def test_the_field_of_texts_is_left_aside_for_rows_of_another_form(run):
    rows = [{**pair, "content": "Nobody learns this."} for pair in PAIRS[:2]]
    training = {**TRAINING, "dataset_text_field": "content"}

    left_over = run("lora_sft", {"data": _list([CHAT] * 2), "training": training, "lora": LORA}).result
    pairs = run("lora_sft", {"data": _list(rows), "training": training, "lora": LORA}, out="pairs").result

    assert (left_over["rows_trained"], pairs["rows_trained"]) == (2, 2)
    assert left_over["warnings"][0].startswith(
        "training.dataset_text_field 'content' is not used: the rows have messages"
    )
    assert "the rows have prompt and completion" in pairs["warnings"][0]


def test_the_settings_that_were_chosen_are_in_the_result(run):
    training = {**TRAINING, "gradient_accumulation_steps": 3, "seed": 7}

    result = run("lora_sft", {"data": _list(PAIRS, eval_split=0.25), "training": training, "lora": LORA}).result

    assert (result["dtype"], result["compute_dtype"]) == ("float32", None)
    assert result["batch"] == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "ranks": 1,
        "effective": 6,
    }
    assert result["seeds"] == {"training": 7, "data": None, "split": 7}
    assert (result["rows"], result["rows_trained"], result["rows_evaluated"]) == (24, 18, 6)


def test_a_loss_that_is_no_number_is_shown_where_it_is_allowed(run, tmp_path):
    training = {
        "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e30, "max_grad_norm": 1e30,
        "lr_scheduler_type": "constant", "save_model": False,
    }  # fmt: skip
    spec = {"data": _list(PAIRS, eval_split=0.25), "lora": LORA}

    failed = run("lora_sft", {**spec, "training": training})
    filtered = run("lora_sft", {**spec, "training": {**training, "logging_nan_inf_filter": True}}, out="filtered")
    allowed = run("lora_sft", {**spec, "training": {**training, "allow_non_finite_loss": True}}, out="allowed")

    assert failed.error["type"] == "NonFiniteLoss"
    assert "training.allow_non_finite_loss" in failed.error["message"]
    history = json.loads((tmp_path / "allowed" / "responses.json").read_text())["history"]
    assert len([entry for entry in history if entry.get("loss", 0.0) is None]) > 0
    assert any("the loss is no number in" in warning for warning in allowed.result["warnings"])
    assert "training.logging_nan_inf_filter is taken as allow_non_finite_loss" in filtered.result["warnings"][0]
    assert filtered.result["steps"] == 6


def test_a_training_whose_rewards_are_all_equal_warns(run):
    spec = {
        "data": _list([{"prompt": "Where?", "answer": "nobody generates this"}] * 4),
        "training": {"max_steps": 4, "per_device_train_batch_size": 2, "num_generations": 2, "save_model": False},
        "generation": {"max_new_tokens": 4},
        "reward_model": {"type": "function", "identifier": "contains_answer"},
        "lora": LORA,
    }

    result = run("grpo", spec).result

    assert any(warning.startswith("reward_std is 0 in the last 4 logs") for warning in result["warnings"])
