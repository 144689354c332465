"""A training whose user has not said when to save: the clock does, within a share of the time."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from executors.checkpoints import to_resume
from gpuflow.protocol import Emitter, complete_checkpoints

pytestmark = pytest.mark.ml

LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
TRAINING = {"max_steps": 6, "per_device_train_batch_size": 4, "max_length": 64, "seed": 1}


def saved(run: Any, tmp_path: Any, pairs: Any, **training: Any) -> list[str]:
    ended = run("lora_sft", {"data": pairs, "training": {**TRAINING, **training}, "lora": LORA})
    assert ended.result["steps"] == 6
    return [path.name for path in complete_checkpoints(tmp_path / "out" / "checkpoints")]


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr("executors.training.checkpoints.SAVE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr("executors.training.checkpoints.SAVING_SHARE", 1e9)


def test_two_are_kept_and_the_next_attempt_goes_on(run, tmp_path, pairs, always):
    assert saved(run, tmp_path, pairs) == ["checkpoint-4", "checkpoint-5"], "the last step is saved as the result"

    resume_from = str(tmp_path / "out" / "checkpoints" / "checkpoint-4")
    spec = {"data": pairs, "training": TRAINING, "lora": LORA}
    again = run("lora_sft", spec, out="attempt-2", resume_from=resume_from)

    assert (again.result["resumed_from_step"], again.result["steps"]) == (4, 6)
    assert to_resume(resume_from).step == 4


def test_a_short_training_saves_none(run, tmp_path, pairs):
    assert saved(run, tmp_path, pairs) == []


@pytest.mark.parametrize(
    ("training", "names"),
    [
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1.2}, ["checkpoint-5", "checkpoint-6"]),
        ({"save_steps": 3}, ["checkpoint-3", "checkpoint-6"]),
    ],
    ids=lambda value: "",
)
def test_what_the_user_says_counts(run, tmp_path, pairs, always, training, names):
    assert saved(run, tmp_path, pairs, **training) == names


def test_saving_takes_a_share_of_the_time(tmp_path):
    from executors.training.checkpoints import SAVE_EVERY_SECONDS, SAVING_SHARE, Checkpoints

    now = 1000.0
    arguments: Any = SimpleNamespace(save_total_limit=None, output_dir=str(tmp_path))
    state: Any = SimpleNamespace(global_step=1, max_steps=99, is_world_process_zero=True)
    callback = Checkpoints(Emitter(io.StringIO()), arguments, by_clock=True, clock=lambda: now)
    callback.on_train_begin(arguments, state, SimpleNamespace())  # type: ignore[arg-type]

    def asks(after: float) -> bool:
        nonlocal now
        now += after
        control: Any = SimpleNamespace(should_save=False)
        callback.on_step_end(arguments, state, control)
        return bool(control.should_save)

    assert not asks(SAVE_EVERY_SECONDS - 1)
    assert asks(1)
    now += 120  # an evaluation
    callback.on_evaluate(arguments, state, SimpleNamespace())  # type: ignore[arg-type]
    now += 90  # the saving
    callback.on_save(arguments, state, SimpleNamespace())  # type: ignore[arg-type]
    assert not asks(SAVE_EVERY_SECONDS)
    assert not asks(90 / SAVING_SHARE - SAVE_EVERY_SECONDS - 1)
    assert asks(1)
    callback.on_save(arguments, state, SimpleNamespace())  # type: ignore[arg-type]
    assert not asks(SAVE_EVERY_SECONDS - 1)
    assert asks(1)
