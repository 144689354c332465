"""What all trainings share when something is wrong: memory, losses that are no numbers, what is not installed."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from executors.base import ExecutorError
from executors.training.memory import Batch
from gpuflow.protocol import Emitter, parse_line
from tests.fixtures.executor_child import Ended, child_environment, request_json
from tests.fixtures.tiny_model import PAIRS

pytestmark = pytest.mark.ml

LORA = {"r": 4, "target_modules": "all-linear"}
ROWS = {"type": "list", "items": list(PAIRS)}
#: A training whose steps take a few hundred MiB: every row is as long as the model allows.
LONG = {"type": "list", "items": [{"text": "Hello Ana, the red car is here. " * 60} for _ in range(128)]}
HEAVY = {"max_length": 256, "save_model": False, "seed": 1, "activation_checkpointing": False}
#: Large blocks of memory go back to the system when they are free, so that a limit means the same in each try.
ALLOCATION = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
#: A child whose address space ends so many MiB above what it has at its first progress event.
LIMITED = Path(__file__).parents[2] / "fixtures" / "limited_child.py"


def _limited(tmp_path, tiny_model, mib, **training):
    spec = {
        "taskType": "sft",
        "model": {"source": {"type": "local", "identifier": str(tiny_model)}},
        "data": LONG,
        "training": {**HEAVY, **training},
    }
    done = subprocess.run(
        [sys.executable, "-P", str(LIMITED), str(mib)],
        input=request_json("sft", spec, tmp_path / "out").encode(),
        capture_output=True,
        env=child_environment(ALLOCATION),
        check=False,
    )
    events = [parse_line(line) for line in done.stdout.splitlines()]
    return Ended(code=done.returncode, events=events, log=done.stderr.decode("utf-8", "replace"))


def test_a_step_that_does_not_fit_is_tried_once_more_with_half_the_batch(tmp_path, tiny_model):
    ended = _limited(tmp_path, tiny_model, 1030, per_device_train_batch_size=128, max_steps=2)

    retry = ended.result["out_of_memory_retry"]
    assert (retry["per_device_train_batch_size"], retry["gradient_accumulation_steps"]) == (64, 2)
    assert retry["before"]["per_device_train_batch_size"] == 128
    assert ended.result["steps"] == 2
    (told,) = [one["message"] for one in ended.named("worker") if one["status"] == "retrying"]
    assert told.startswith("out of memory with a batch of 128; trying again with 64 and 2 instead of 1 batches a step")


def test_one_row_that_does_not_fit_fails_and_says_so(tmp_path, tiny_model):
    ended = _limited(tmp_path, tiny_model, 16, per_device_train_batch_size=1, max_steps=2)

    assert (ended.error["type"], ended.error["retryable"]) == ("OutOfMemory", True)
    assert "out of memory with a batch of 1" in ended.error["message"]
    assert "section lora" in ended.error["message"]
    assert [one for one in ended.named("worker") if one["status"] == "retrying"] == []


def test_half_a_batch_takes_as_many_rows_a_step():
    assert Batch(size=4, accumulation=3, eval_size=8).halved().arguments() == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 6,
        "per_device_eval_batch_size": 4,
    }
    odd = Batch(size=5, accumulation=1, eval_size=1).halved()
    assert (odd.size, odd.accumulation, odd.eval_size) == (1, 5, 1)
    groups = Batch(size=8, accumulation=1, eval_size=8, eval_group=8).halved()
    assert groups.eval_size == 8
    assert groups.applied_to({"steps_per_generation": 2})["steps_per_generation"] == 4
    assert Batch(size=1, accumulation=1, eval_size=8).halved() is None


def test_ranks_do_not_begin_again_one_by_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert Batch(size=4, accumulation=1, eval_size=8).halved() is None


@pytest.mark.parametrize("task_type", ["lora_sft", "dpo"])
def test_a_loss_that_is_no_number_fails_the_training_unless_it_is_filtered(run, task_type):
    rows = [{"prompt": p["prompt"], "chosen": p["completion"], "rejected": "Gone, all of it."} for p in PAIRS]
    data = ROWS if task_type == "lora_sft" else {"type": "preferences", "preferences": rows}
    training = {
        "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e30, "max_grad_norm": 1e30,
        "lr_scheduler_type": "constant", "save_model": False,
    }  # fmt: skip
    spec = {"data": data, "training": training, "lora": LORA}

    failed = run(task_type, spec)
    filtered = run(task_type, {**spec, "training": {**training, "logging_nan_inf_filter": True}})

    assert (failed.error["type"], failed.error["retryable"]) == ("NonFiniteLoss", False)
    assert "the training has diverged; use a smaller training.learning_rate" in failed.error["message"]
    assert filtered.result["steps"] == 6


@pytest.mark.parametrize(
    ("spec", "kind", "says"),
    [
        ({"training": {"report_to": "wandb"}}, "MissingDependency", "pip install 'gpuflow[tracking]'"),
        ({"training": {"report_to": ["none", "mlflow"]}}, "MissingDependency", "training.report_to: mlflow"),
        ({"training": {"deepspeed": {"zero_optimization": {"stage": 2}}}}, "MissingDependency", "training.deepspeed"),
        (
            {"model": {"transformers": {"quantization_config": {"load_in_4bit": True}}}},
            "BadInput",
            "quantised loading needs a GPU, and this task has none",
        ),
        (
            {"model": {"transformers": {"load_in_8bit": True}}, "training": {"merge_adapter": True}},
            "BadInput",
            "cannot be merged into quantised weights",
        ),
    ],
)
def test_what_is_not_there_is_said_before_the_model_loads(run, monkeypatch, spec, kind, says):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in ("wandb", "mlflow", "deepspeed") else found(name, *more),
    )

    ended = run("lora_sft", {"data": ROWS, **spec})

    assert ended.error["type"] == kind
    assert says in ended.error["message"]
    assert ended.named("worker") == []


def test_all_weights_cannot_be_quantised_nor_merged(run):
    quantised = run("sft", {"data": ROWS, "model": {"transformers": {"load_in_4bit": True}}})
    merged = run("sft", {"data": ROWS, "training": {"merge_adapter": True}})

    assert "quantised weights cannot be trained; add the section lora" in quantised.error["message"]
    assert "there is no adapter to merge" in merged.error["message"]


@pytest.mark.parametrize(("rows", "is_told"), [(1, True), (4, False)])
def test_a_batch_of_one_is_named_as_a_cause_where_ppo_has_one(rows, is_told):
    from executors.training.progress import Progress

    progress = Progress(Emitter(io.StringIO()), fails_on_nan=True)
    state = SimpleNamespace(global_step=3, max_steps=9, is_world_process_zero=True)

    with pytest.raises(ExecutorError, match="loss is nan at step 3") as caught:
        progress.on_log(SimpleNamespace(local_batch_size=rows), state, None, {"loss/policy_avg": float("nan")})
    assert ("an answer of one token in a batch of one" in str(caught.value)) is is_told


def test_no_reporter_may_be_written_as_null(run):
    training = {"max_steps": 1, "per_device_train_batch_size": 2, "save_model": False, "report_to": None}

    assert run("lora_sft", {"data": ROWS, "training": training, "lora": LORA}).result["steps"] == 1


def test_tensorboard_gets_the_losses(run, tmp_path):
    if os.environ.get("CI") != "true":
        pytest.importorskip("tensorboard", reason="the extra tracking is not installed")
    training = {"max_steps": 2, "per_device_train_batch_size": 2, "save_model": False, "report_to": "tensorboard"}

    ended = run("lora_sft", {"data": ROWS, "training": training, "lora": LORA})

    assert ended.result["steps"] == 2
    assert {"path": "tensorboard"} in ended.named("artifact")
    (events,) = (tmp_path / "out" / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_wandb_without_a_key_writes_the_losses_to_a_folder_of_the_result(run, tmp_path, monkeypatch):
    if os.environ.get("CI") != "true":
        pytest.importorskip("wandb", reason="the extra tracking is not installed")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    training = {"max_steps": 2, "per_device_train_batch_size": 2, "save_model": False, "report_to": "wandb"}

    ended = run("lora_sft", {"data": ROWS, "training": training, "lora": LORA})

    assert ended.result["steps"] == 2
    assert {"path": "wandb"} in ended.named("artifact")
    (log,) = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in log.read_bytes()


def test_mlflow_writes_the_losses_to_a_folder_of_the_result(run, tmp_path, monkeypatch):
    if os.environ.get("CI") != "true":
        pytest.importorskip("mlflow", reason="the extra tracking is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    training = {"max_steps": 2, "per_device_train_batch_size": 2, "save_model": False, "report_to": "mlflow"}

    ended = run("lora_sft", {"data": ROWS, "training": training, "lora": LORA})

    assert ended.result["steps"] == 2
    assert {"path": "mlruns"} in ended.named("artifact")
    (losses,) = (tmp_path / "out" / "mlruns").glob("*/*/metrics/loss")
    assert len(losses.read_text().splitlines()) == 2


def test_a_resumed_training_gives_one_training_loss(run, tmp_path):
    training = {"max_steps": 4, "per_device_train_batch_size": 2, "save_steps": 2, "logging_steps": 1}
    spec = {"data": ROWS, "training": {**training, "save_model": False}, "lora": LORA}
    whole = run("lora_sft", spec, out="whole", checkpoint_dir=str(tmp_path / "checkpoints"))

    again = run("lora_sft", spec, out="again", resume_from=whole.result["checkpoints"][0]).result

    assert again["train_loss"] == pytest.approx(whole.result["train_loss"], rel=1e-3)
    assert again["metrics"]["train_loss"] == again["train_loss"]
