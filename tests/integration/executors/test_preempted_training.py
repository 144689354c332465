"""A training that ends early, by a notice or by kill -9, goes on in another child and repeats no step."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from gpuflow.protocol import complete_checkpoints, is_complete, parse_line
from tests.fixtures.executor_child import child_environment, request_json

pytestmark = pytest.mark.ml

LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 5e-3, "max_length": 64, "seed": 1, "logging_steps": 1}


def spec(pairs, **training):
    return {"data": pairs, "training": {**TRAINING, **training}, "lora": LORA}


def steps(ended):
    return [event["current"] for event in ended.named("progress") if "loss" in event["metrics"]]


def test_a_notice_saves_a_checkpoint_and_the_next_child_goes_on(start, run, tmp_path, pairs):
    task = spec(pairs, max_steps=1000)
    child = start("lora_sft", task, out="attempt-1")
    child.until("progress", current=3)

    child.signal(signal.SIGUSR1)
    first = child.end()

    (told,) = first.named("checkpoint")
    assert 3 <= told["step"] < 1000
    assert (first.code, first.finish["status"]) == (143, "cancelled")
    error = first.finish["error"]
    assert (error["type"], error["retryable"]) == ("Preempted", True)
    assert error["message"].endswith(f"at step {told['step']} of 1000; its checkpoint is in {told['path']}")
    out = tmp_path / "attempt-1"
    assert [str(path) for path in complete_checkpoints(out / "checkpoints")] == [told["path"]]
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints"]
    assert first.named("result") == []
    assert "Traceback" not in first.log

    total = told["step"] + 5
    second = start("lora_sft", spec(pairs, max_steps=total), out="attempt-2", resume_from=told["path"]).end()

    assert second.result["steps"] == total
    assert second.result["resumed_from_step"] == told["step"]
    assert steps(second) == list(range(told["step"] + 1, total + 1))
    assert (tmp_path / "attempt-2" / "final_lora" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("epochs", [{"max_steps": 8}, {"num_train_epochs": 2}], ids=["in-an-epoch", "at-its-end"])
def test_nothing_is_trained_again_where_only_the_end_is_missing(run, tmp_path, pairs, epochs):
    task = spec(pairs, save_steps=4, **epochs)
    whole = run("lora_sft", task, out="attempt-1").result

    ended = run("lora_sft", task, out="attempt-2", resume_from=str(tmp_path / "attempt-1" / "checkpoints"))

    assert steps(ended) == []
    again = ended.result
    assert (again["steps"], again["resumed_from_step"]) == (whole["steps"], whole["steps"])
    assert again["eval_loss_after"] == pytest.approx(whole["eval_loss_after"], rel=1e-4)
    assert again["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-2)
    assert again["final_lora"] == "final_lora"


def test_a_notice_in_the_last_evaluation_saves_the_training(start, run, tmp_path):
    rows = [f"Hello Ana number {number}." for number in range(200)]
    task = spec({"type": "list", "items": rows, "eval_split": 0.9}, max_steps=4, per_device_eval_batch_size=1)
    child = start("lora_sft", task, out="attempt-1")
    child.until("worker", message="evaluating after the training")

    child.signal(signal.SIGUSR1)
    first = child.end()

    assert first.finish["error"]["type"] == "Preempted"
    assert [event["step"] for event in first.named("checkpoint")] == [4]
    ended = run("lora_sft", task, out="attempt-2", resume_from=str(tmp_path / "attempt-1" / "checkpoints"))
    assert (ended.result["steps"], steps(ended)) == (4, [])


def test_save_total_limit_counts_complete_checkpoints(run, tmp_path, pairs):
    ended = run("lora_sft", spec(pairs, max_steps=6, save_steps=1, save_total_limit=2))

    assert [path.rsplit("/", 1)[1] for path in ended.result["checkpoints"]] == ["checkpoint-5", "checkpoint-6"]
    assert {path.name for path in (tmp_path / "out" / "checkpoints").glob("checkpoint-*")} == {
        "checkpoint-5",
        "checkpoint-6",
    }


@pytest.mark.parametrize(
    ("place", "seen"),
    [
        # The model of the second checkpoint is written, its optimizer is not.
        ("transformers.Trainer._save_optimizer_and_scheduler", "checkpoint-2"),
        # All of it is written, but not marked.
        ("executors.training.checkpoints.mark_complete", "checkpoint-2"),
        # It is marked, and the first one loses its files.
        ("shutil.rmtree", "checkpoint-4"),
    ],
    ids=["writing", "marking", "removing"],
)
def test_kill_9_in_the_middle_of_saving_leaves_no_half_checkpoint(run, tmp_path, tiny_model, pairs, place, seen):
    task = spec(pairs, max_steps=6, save_steps=2, save_total_limit=1)
    module, _, name = place.rpartition(".")
    # Given a child that dies by SIGKILL when it comes to that place with a checkpoint behind it.
    code = f"""
import os, pathlib, pkgutil, runpy
place = pkgutil.resolve_name({module!r})
real = getattr(place, {name!r})
def deadly(*args, **kwargs):
    found = list(pathlib.Path("out/checkpoints").glob("checkpoint-*/complete.json"))
    if found and (os.fspath(found[0]).count("checkpoint-2") or {name!r} == "rmtree"):
        os.kill(os.getpid(), 9)
    return real(*args, **kwargs)
setattr(place, {name!r}, deadly)
runpy.run_module("executors", run_name="__main__")
"""
    source = {"source": {"type": "local", "identifier": str(tiny_model)}}
    request = request_json("lora_sft", {"taskType": "lora_sft", **task, "model": source}, tmp_path / "out")

    killed = subprocess.run(
        [sys.executable, "-c", code],
        input=request.encode(),
        capture_output=True,
        env=child_environment(),
        cwd=tmp_path,
        check=False,
    )

    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert "finish" not in [parse_line(line).name for line in killed.stdout.splitlines()]
    checkpoints = tmp_path / "out" / "checkpoints"
    assert [path.name for path in complete_checkpoints(checkpoints)] == [seen]
    halves = [path for path in checkpoints.glob("checkpoint-*") if not is_complete(path)]
    assert len(halves) == 1

    ended = run("lora_sft", task, out="attempt-2", resume_from=str(checkpoints))
    assert ended.result["steps"] == 6
    assert steps(ended) == list(range(int(seen.rsplit("-", 1)[1]) + 1, 7))
