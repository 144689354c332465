"""The task type dpo on a tiny model: what it learns, the forms of its data, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.fixtures.tiny_model import PAIRS

pytestmark = pytest.mark.ml

TRAINING = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "max_length": 64, "seed": 1}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
PREFERENCES = [
    {"prompt": pair["prompt"], "chosen": pair["completion"], "rejected": "Hello Ana, I will not say it."}
    for pair in PAIRS
]


def _data(rows, **extra):
    return {"type": "preferences", "preferences": rows, **extra}


def test_dpo_with_an_adapter_learns_what_is_preferred(start, run, tmp_path):
    tuned = start(
        "dpo", {"data": _data(PREFERENCES, eval_split=0.2), "training": TRAINING, "lora": LORA}, out="tune"
    ).end()

    result = tuned.result
    assert result["steps"] == 12
    assert result["eval_loss_before"] == pytest.approx(0.6931, abs=0.01)  # ln 2: model and reference are the same
    assert result["eval_loss_after"] < result["eval_loss_before"] * 0.7
    assert (result["metrics"]["train_rows"], result["metrics"]["eval_rows"]) == (19, 5)
    assert (result["final_lora"], result["dtype"]) == ("final_lora", "float32")
    steps = [event for event in tuned.named("progress") if "rewards/margins" in event["metrics"]]
    assert steps[-1]["metrics"]["rewards/margins"] > 0
    assert (tmp_path / "tune" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert {"path": "loss.png"} in tuned.named("artifact")
    assert "Traceback" not in tuned.log

    ask = {
        "data": {"type": "list", "items": ["Where is the red car?"]},
        "inference": {"temperature": 0, "max_tokens": 4},
        "model": {"adapters": [{"type": "lora", "path": str(tmp_path / "tune" / "final_lora")}]},
    }
    assert run("inference", ask, out="ask").result["items"][0]["output"]


def test_dpo_of_all_weights_begins_at_the_model_that_it_is_given(run, tmp_path):
    first = run("dpo", {"data": _data(PREFERENCES), "training": TRAINING}, out="first")

    assert first.result["final_model"] == "final_model"
    again = run(
        "dpo",
        {"data": _data(PREFERENCES, eval_split=0.2), "training": {**TRAINING, "max_steps": 1, "save_model": False}},
        out="again",
        checkpoint_path=str(tmp_path / "first" / "final_model"),
    )
    assert again.result["eval_loss_before"] == pytest.approx(0.6931, abs=0.01)
    assert "final_model" not in again.result


def test_an_adapter_can_be_merged_into_the_model_that_is_left(run, tmp_path):
    training = {**TRAINING, "max_steps": 1, "merge_adapter": True}

    result = run("dpo", {"data": _data(PREFERENCES), "training": training, "lora": LORA}, out="tune").result

    assert result["final_model"] == "final_model"
    assert "final_lora" not in result
    assert not (tmp_path / "tune" / "final_model" / "adapter_config.json").exists()
    ask = {"data": {"type": "list", "items": ["Where?"]}, "inference": {"temperature": 0, "max_tokens": 2}}
    asked = run("inference", ask, out="ask", checkpoint_path=str(tmp_path / "tune" / "final_model"))
    assert len(asked.result["items"]) == 1


_USER, _GOOD, _BAD = (
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "Here."},
    {"role": "assistant", "content": "Gone."},
)


@pytest.mark.parametrize(
    ("row", "extra"),
    [
        ({"prompt": [_USER], "chosen": [_GOOD], "rejected": [_BAD]}, {}),
        ({"chosen": [_USER, _GOOD], "rejected": [_USER, _BAD]}, {}),
        ({"chosen": "Where is it? Here.", "rejected": "Where is it? Gone."}, {}),
        ({"question": "Where is it?", "chosen": "Here.", "rejected": "Gone."}, {}),
        (
            {"q": "Where?", "a": "Here.", "b": "Gone."},
            {"columns": {"prompt": "q", "chosen": "a", "rejected": "b"}, "separator": " "},
        ),
    ],
    ids=["messages", "whole-chats", "whole-texts", "usual-names", "columns"],
)
def test_trains_on_preferences_of_every_form(run, tmp_path, row, extra, plain_model):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    training = {"max_steps": 1, "per_device_train_batch_size": 2, "save_model": False}
    spec = {"data": {"type": "jsonl", "path": str(path), **extra}, "training": training, "lora": {"r": 2}}

    for model in ({}, {"model": plain_model}):
        assert run("dpo", spec, **model).result["train_loss"] == pytest.approx(0.6931, abs=0.01)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt": "a", "completion": "b"}], "no chosen and rejected; the columns found are: prompt, completion"),
        (
            [PREFERENCES[0], {"prompt": "a", "chosen": "b", "rejected": "b"}],
            "data row 1: chosen and rejected are equal",
        ),
        ([PREFERENCES[0], {"prompt": "a", "chosen": "", "rejected": "b"}], "data row 1: chosen is empty"),
        ([PREFERENCES[0], {"prompt": "a", "chosen": "b"}], "data row 1 lacks 'rejected'"),
        ([{"prompt": "a", "chosen": "b", "rejected": [_BAD]}], "data row 0: chosen and rejected must both be text"),
        ([{"prompt": {}, "chosen": "b", "rejected": "c"}], "data row 0: prompt is dict; it must be text"),
    ],
)
def test_wrong_preferences_are_named_before_the_model_loads(run, rows, says):
    spec = {"data": {"type": "list", "items": rows}, "model": {"source": {"type": "local", "identifier": "/nowhere"}}}

    ended = run("dpo", spec)

    assert (ended.code, ended.error["type"]) == (1, "BadInput")
    assert says in ended.error["message"]
    assert ended.named("worker") == []


def test_rows_that_are_too_long_are_counted_or_refused(run):
    long = {"prompt": "Where is the red car? " * 20, "chosen": "Here.", "rejected": "Gone."}
    training = {"max_steps": 1, "per_device_train_batch_size": 1, "max_length": 48, "save_model": False}

    some = run("dpo", {"data": _data([*PREFERENCES[:3], long]), "training": training, "lora": LORA})
    none = run("dpo", {"data": _data([long, long]), "training": training, "lora": LORA})

    assert some.result["metrics"]["train_rows"] == 3
    assert (some.result["rows"], some.result["rows_trained"], some.result["rows_dropped"]) == (4, 3, {"max_length": 1})
    assert any("1 of 4 rows have no completion left" in one["message"] for one in some.named("worker"))
    assert none.error["type"] == "BadInput"
    assert "2 of 2 rows have no completion left within training.max_length 48" in none.error["message"]
