"""The task types sft and lora_sft on a tiny model; one task and a cancel by real child processes."""

from __future__ import annotations

import json
import signal

import pytest

pytestmark = pytest.mark.ml

TRAINING = {"max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "max_length": 64, "seed": 1}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
ASK = {
    "data": {"type": "list", "items": ["Where is the red car?", "Where is the blue lamp?"]},
    "inference": {"temperature": 0, "max_tokens": 12},
}


def _outputs(ended):
    return [item["output"] for item in ended.result["items"]]


def test_lora_learns_and_its_adapter_changes_the_answers(start, run, tmp_path, pairs, tiny_model):
    tuned = start("lora_sft", {"data": pairs, "training": TRAINING, "lora": LORA}, out="tune").end()
    folder = tmp_path / "tune" / "final_lora"

    result = tuned.result
    assert result["steps"] == 20
    assert result["eval_loss_after"] < result["eval_loss_before"] * 0.9
    assert result["final_lora"] == "final_lora"
    assert {"path": "final_lora"} in tuned.named("artifact")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_model)
    assert (folder / "tokenizer.json").is_file()
    assert sorted(path.name for path in folder.parent.iterdir() if path.name.startswith(".")) == []
    written = json.loads((tmp_path / "tune" / "responses.json").read_text())
    assert [entry["step"] for entry in written["history"] if "loss" in entry] == list(range(1, 21))
    steps = [event for event in tuned.named("progress") if "loss" in event["metrics"]]
    assert len(steps) == 20
    assert {"loss", "learning_rate", "tokens_per_second"} <= set(steps[-1]["metrics"])
    assert (steps[-1]["current"], steps[-1]["total"], steps[-1]["unit"]) == (20, 20, "step")
    assert "Traceback" not in tuned.log

    base = run("inference", ASK, out="base")
    adapter = {"type": "lora", "path": str(folder)}
    with_adapter = run("inference", {**ASK, "model": {"adapters": [adapter]}}, out="adapter")
    by_checkpoint = run("inference", ASK, out="checkpoint", checkpoint_path=str(folder))
    switched_off = run("inference", {**ASK, "model": {"adapters": [{**adapter, "weight": 0.0}]}}, out="off")
    halves = [{**adapter, "weight": 0.5}, {**adapter, "weight": 0.5}]
    summed = run("inference", {**ASK, "model": {"adapters": halves}}, out="summed")

    assert _outputs(with_adapter) != _outputs(base)
    assert _outputs(by_checkpoint) == _outputs(with_adapter)
    assert _outputs(switched_off) == _outputs(base)
    assert _outputs(summed) == _outputs(with_adapter)


def test_an_adapter_that_says_nothing_is_on_all_linear_layers_and_learns_at_its_own_rate(run, tmp_path, pairs):
    from safetensors.torch import load_file

    said = {"max_steps": 1, "lr_scheduler_type": "constant"}

    for task_type, rate in (("lora_sft", 2e-4), ("sft", 2e-5)):
        ended = run(task_type, {"data": pairs, "training": said}, out=task_type)
        (step,) = [event["metrics"] for event in ended.named("progress") if "learning_rate" in event["metrics"]]
        assert step["learning_rate"] == pytest.approx(rate)

    weights = load_file(tmp_path / "lora_sft" / "final_lora" / "adapter_model.safetensors")
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {layer for layer in layers if any(layer in name for name in weights)} == set(layers)


def test_sft_learns_and_its_model_answers(run, tmp_path, pairs):
    tuned = run("sft", {"data": pairs, "training": TRAINING}, out="tune")

    result = tuned.result
    assert result["eval_loss_after"] < result["eval_loss_before"] * 0.9
    assert result["final_model"] == "final_model"
    base = run("inference", ASK, out="base")
    asked = run("inference", ASK, out="ask", checkpoint_path=str(tmp_path / "tune" / "final_model"))
    assert _outputs(asked) != _outputs(base)
    assert any("The" in output for output in _outputs(asked))

    adapted = run(
        "lora_sft",
        {"data": pairs, "training": {**TRAINING, "max_steps": 2}, "lora": LORA},
        out="further",
        checkpoint_path=str(tmp_path / "tune" / "final_model"),
    )
    assert adapted.result["eval_loss_before"] == pytest.approx(result["eval_loss_after"], rel=0.02)


def test_a_resumed_training_ends_as_an_uninterrupted_one(run, tmp_path, pairs):
    training = {**TRAINING, "max_steps": 10, "save_steps": 4, "save_total_limit": 5}
    spec = {"data": pairs, "training": training, "lora": LORA}

    whole = run("lora_sft", spec, out="whole", checkpoint_dir=str(tmp_path / "checkpoints"))

    kept = whole.result["checkpoints"]
    assert [path.rsplit("/", 1)[1] for path in kept] == ["checkpoint-4", "checkpoint-8", "checkpoint-10"]
    assert [event["step"] for event in whole.named("checkpoint")] == [4, 8, 10]
    resumed = run("lora_sft", spec, out="again", checkpoint_dir=str(tmp_path / "more"), resume_from=kept[0])
    steps = [event["current"] for event in resumed.named("progress") if "loss" in event["metrics"]]
    assert steps == [5, 6, 7, 8, 9, 10]
    assert resumed.result["eval_loss_after"] == pytest.approx(whole.result["eval_loss_after"], rel=1e-4)

    (tmp_path / "checkpoints" / "checkpoint-10" / "complete.json").unlink()
    newest = run(
        "lora_sft", spec, out="newest", checkpoint_dir=str(tmp_path / "x"), resume_from=str(tmp_path / "checkpoints")
    )
    assert [event["current"] for event in newest.named("progress") if "loss" in event["metrics"]] == [9, 10]


@pytest.mark.parametrize(
    ("rows", "extra"),
    [
        ([{"text": f"Hello Ana number {number}."} for number in range(6)], {}),
        (
            [
                {"messages": [{"role": "user", "content": f"Hi {n}"}, {"role": "assistant", "content": "Hello"}]}
                for n in range(6)
            ],
            {},
        ),
        (
            [{"frage": f"Where is {number}?", "antwort": "Here."} for number in range(6)],
            {"columns": {"prompt": "frage", "completion": "antwort"}},
        ),
        ([{"question": f"Where is {number}?", "answer": "Here."} for number in range(6)], {"separator": " "}),
    ],
    ids=["text", "messages", "columns", "separator"],
)
def test_trains_on_rows_of_every_form(run, rows, extra, plain_model):
    training = {"max_steps": 1, "per_device_train_batch_size": 2, "save_model": False}
    spec = {"data": {"type": "list", "items": rows, **extra}, "training": training, "lora": LORA}

    for model in ({}, {"model": plain_model}):
        result = run("lora_sft", spec, **model).result
        assert result["steps"] == 1
        assert result["train_loss"] > 0
        assert result["eval_loss_before"] is None
        assert "final_lora" not in result


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"data": {"type": "list", "items": [{"frage": "x", "antwort": "y"}]}}, "columns found are: frage, antwort"),
        ({"data": {"type": "list", "items": ["x"], "columns": {"text": "body"}}}, "columns found are: text"),
        ({"data": {"type": "list", "items": ["x"], "eval_split": 0.5}}, "nothing to train on"),
        ({"data": {"type": "list", "items": ["x"], "eval_split": "test"}}, "only hub data sets have"),
    ],
)
def test_wrong_data_is_told_before_the_model_loads(run, spec, says):
    ended = run("lora_sft", {**spec, "model": {"source": {"type": "local", "identifier": "/nowhere"}}})

    assert (ended.code, ended.error["type"]) == (1, "BadInput")
    assert says in ended.error["message"]
    assert ended.named("worker") == []


@pytest.mark.parametrize(
    ("training", "lora", "says"),
    [
        ({"eval_strategy": "steps"}, {}, "needs data to evaluate on"),
        ({"lr_scheduler_type": "mystery"}, {}, "training: "),
        ({}, {"r": 4, "no_such_field": 1}, "lora: "),
        ({}, {"target_modules": ["no_such_layer"]}, "no_such_layer"),
    ],
)
def test_wrong_arguments_are_told(run, training, lora, says):
    spec = {"data": {"type": "list", "items": ["a", "b"]}, "training": {"max_steps": 1, **training}, "lora": lora}

    ended = run("lora_sft", spec)

    assert ended.code == 1
    assert says in ended.error["message"]
    assert not ended.error["retryable"]


def test_sigterm_leaves_nothing_half(start, tmp_path, pairs):
    child = start(
        "lora_sft",
        {"data": pairs, "training": {**TRAINING, "max_steps": 100_000, "logging_steps": 1}, "lora": LORA},
    )
    child.until("progress", current=3)

    child.signal(signal.SIGTERM)
    ended = child.end()

    assert (ended.code, ended.finish) == (143, {"status": "cancelled"})
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"checkpoints"}
