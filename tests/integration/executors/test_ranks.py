"""A training in two ranks (gloo, on the CPU): the result of one process, one clear failure, and nothing left."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.protocol import complete_checkpoints
from tests.fixtures.executor_child import Child, request_json
from tests.fixtures.faulty_model import make_faulty_model
from tests.fixtures.tiny_model import PAIRS
from tests.support.fleet import gone
from tests.support.waiting import eventually

pytestmark = pytest.mark.ml

ROWS = {"type": "list", "items": [dict(pair) for pair in PAIRS[:16]]}
TRAINING = {"max_steps": 6, "learning_rate": 5e-3, "max_length": 64, "seed": 1, "logging_steps": 1}
#: The same global batch of 4 rows.
ONE = {**TRAINING, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
TWO = {**TRAINING, "per_device_train_batch_size": 2, "nproc_per_node": 2}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
FOR_EVER = {**TWO, "max_steps": 1_000_000}


def losses(ended: Any) -> list[float]:
    return [event["metrics"]["loss"] for event in ended.named("progress") if "loss" in event["metrics"]]


def weights(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def tree(child: Child) -> list[int]:
    """The processes of a training that runs: launcher, agent and two ranks."""
    pids = [process.pid for process in psutil.Process(child.pid).children(recursive=True)]
    assert len(pids) >= 3
    return [child.pid, *pids]


def test_two_ranks_end_as_one_process(start, run, tmp_path):
    one = run("sft", {"data": {**ROWS, "eval_split": None}, "training": ONE}, out="one")
    # Given the leased GPUs of a request alone: two ranks are what it comes to.
    asked = {name: value for name, value in TWO.items() if name != "nproc_per_node"}
    ranks = start("sft", {"data": ROWS, "training": asked}, out="two", gpus=["GPU-a", "GPU-b"]).end()

    assert losses(ranks) == pytest.approx(losses(one), rel=1e-4)
    assert len(losses(ranks)) == 6
    assert ranks.result["steps"] == 6
    assert len(ranks.named("result")) == len(ranks.named("finish")) == len(ranks.named("connection")) == 1
    files = ["final_model", "loss.png", "responses.json"]
    assert ranks.named("artifact") == [{"path": name} for name in files]
    assert {path.name for path in (tmp_path / "two").iterdir()} <= {*files, "checkpoints"}
    expected, found = weights(tmp_path / "one" / "final_model"), weights(tmp_path / "two" / "final_model")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert float((value - found[name]).abs().max()) < 1e-3, name
    assert "[rank 1] " in ranks.log
    assert "Traceback" not in ranks.log


def test_a_sharded_training_ends_as_one_process_and_goes_on(start, run, tmp_path, pairs):
    data = {"type": "list", "items": [dict(pair) for pair in PAIRS[:20]], "eval_split": 0.2, "seed": 1}
    one = run("sft", {"data": data, "training": {**ONE, "save_steps": 3}}, out="one")
    task = {"data": data, "training": {**TWO, "fsdp": True, "save_steps": 3}}

    sharded = start("sft", task, out="sharded").end()

    assert losses(sharded) == pytest.approx(losses(one), rel=1e-3)
    assert sharded.result["eval_loss_after"] == pytest.approx(one.result["eval_loss_after"], rel=1e-2)
    expected, found = weights(tmp_path / "one" / "final_model"), weights(tmp_path / "sharded" / "final_model")
    assert {name: value.shape for name, value in expected.items()} == {
        name: value.shape for name, value in found.items()
    }
    for name, value in expected.items():
        assert float((value - found[name]).abs().max()) < 1e-3, name

    (first, _) = complete_checkpoints(tmp_path / "sharded" / "checkpoints")
    again = start("sft", task, out="again", resume_from=str(first)).end()
    assert again.result["resumed_from_step"] == 3
    assert losses(again) == pytest.approx(losses(sharded)[3:], rel=1e-3)


def test_the_rank_without_memory_is_named(monkeypatch, tmp_path):
    model, environment = make_faulty_model(tmp_path, monkeypatch, kind="memory", rank=1, call=2)
    spec = {"taskType": "lora_sft", "model": model, "data": ROWS, "training": TWO, "lora": LORA}
    child = Child(request_json("lora_sft", spec, tmp_path / "out"), environment)
    try:
        ended = child.end()
    finally:
        child.close()

    assert (ended.code, ended.error["type"], ended.error["retryable"]) == (1, "OutOfMemory", True)
    assert ended.error["message"].startswith("rank 1 of 2: ")
    assert "allocate" in ended.error["message"]
    assert "[rank 1] Traceback" in ended.log
    assert ended.named("result") == []


def test_ranks_that_would_train_apart_do_not_train(monkeypatch, tmp_path):
    model, environment = make_faulty_model(tmp_path, monkeypatch, kind="alone")
    data = {**ROWS, "eval_split": 0.2}
    spec = {"taskType": "lora_sft", "model": model, "data": data, "training": TWO, "lora": LORA}
    child = Child(request_json("lora_sft", spec, tmp_path / "out"), environment)
    try:
        ended = child.end()
    finally:
        child.close()

    assert ended.code == 1
    assert "the 2 ranks do not exchange their gradients" in ended.error["message"]
    assert losses(ended) == []


def test_a_cancel_ends_every_process_and_no_secret_is_left(start, tmp_path):
    data = {"type": "list", "items": [{"prompt": "a", "completion": "TOP-SECRET"}] * 8}
    child = start("lora_sft", {"data": data, "training": FOR_EVER, "lora": LORA})
    child.until("progress", current=2)
    pids = tree(child)
    lines = [psutil.Process(pid).cmdline() for pid in pids]
    folder = Path(next(part for line in lines for part in line if "gpuflow-ranks-" in part))
    assert not any("TOP-SECRET" in part for line in lines for part in line)
    assert not any(b"TOP-SECRET" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert folder.stat().st_mode & 0o777 == 0o700

    child.signal(signal.SIGTERM)
    ended = child.end()

    assert (ended.code, ended.finish) == (143, {"status": "cancelled"})
    gone(pids)
    assert not folder.exists()
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"checkpoints"}
    assert "Traceback" not in ended.log


def test_nothing_outlives_a_killed_child(start):
    child = start("lora_sft", {"data": ROWS, "training": FOR_EVER, "lora": LORA})
    child.until("progress", current=2)
    pids = tree(child)

    child.signal(signal.SIGKILL)

    assert child.end().code == -signal.SIGKILL
    gone(pids)


def test_a_notice_saves_one_checkpoint_of_all_ranks(start, run, tmp_path):
    child = start("lora_sft", {"data": ROWS, "training": FOR_EVER, "lora": LORA}, out="first")
    child.until("progress", current=3)

    child.signal(signal.SIGUSR1)
    first = child.end()

    (told,) = first.named("checkpoint")
    assert (first.code, first.finish["error"]["type"]) == (143, "Preempted")
    assert first.finish["error"]["message"].endswith(f"its checkpoint is in {told['path']}")
    names = {path.name for path in Path(told["path"]).iterdir()}
    assert {"complete.json", "rng_state_0.pth", "rng_state_1.pth"} <= names
    # Another number of processes goes on with the same global batch.
    total = told["step"] + 2
    task = {"data": ROWS, "training": {**ONE, "max_steps": total}, "lora": LORA}
    second = run("lora_sft", task, out="second", resume_from=told["path"])
    assert (second.result["steps"], second.result["resumed_from_step"]) == (total, told["step"])
    assert len(losses(second)) == 2


def test_a_notice_while_the_ranks_start_ends_them_with_nothing_saved(start):
    child = start("lora_sft", {"data": ROWS, "training": FOR_EVER, "lora": LORA})
    child.until("worker", message="starting 2 ranks")

    def agent() -> psutil.Process | None:
        return next((one for one in psutil.Process(child.pid).children() if "agent" in " ".join(one.cmdline())), None)

    assert eventually(agent)
    child.signal(signal.SIGUSR1)
    ended = child.end()

    assert (ended.code, ended.finish["error"]["type"]) == (143, "Preempted")
    assert ended.named("result") == []


def test_more_ranks_than_gpus_are_refused(start):
    ended = start("lora_sft", {"data": ROWS, "training": {**TWO, "nproc_per_node": 3}}, gpus=["GPU-a", "GPU-b"]).end()

    assert (ended.code, ended.error["type"], ended.error["retryable"]) == (1, "BadInput", False)
    assert "nproc_per_node is 3, but the task has 2 GPUs" in ended.error["message"]
