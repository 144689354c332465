"""A real training (TRL and PEFT on a tiny model) loses its worker, or is drained away: it goes on, and ends once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import Task, submit
from tests.chaos.accounting import check
from tests.chaos.conftest import LEASE
from tests.fixtures.tiny_model import PAIRS, make_tiny_model
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually

pytestmark = [pytest.mark.ml, pytest.mark.timeout(300)]

STEPS = 150


def training(model: Path) -> dict[str, Any]:
    return {
        "taskType": "lora_sft",
        "model": {"source": {"type": "local", "identifier": str(model)}},
        "data": {"type": "list", "items": PAIRS},
        "training": {"max_steps": STEPS, "per_device_train_batch_size": 4, "max_length": 64, "save_steps": 10},
        "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    }


def step(task: Task) -> float:
    return float((task.record().progress or {}).get("current") or 0)


def begin(fleet: TestFleet, model: Path) -> tuple[Task, WorkerProcess, WorkerProcess]:
    """Start a training and two workers; return the one that runs it first."""
    workers = {name: fleet.start_worker(name, "--max-jobs", "1", env=LEASE) for name in ("w1", "w2")}
    task = submit(training(model), app=fleet.app)
    eventually(lambda: step(task) >= 25, within=120, what="step 25")
    busy = workers.pop(str(task.record().worker))
    (idle,) = workers.values()
    return task, busy, idle


def test_a_training_survives_kill_9_of_its_worker(fleet: TestFleet, tmp_path: Path) -> None:
    task, busy, idle = begin(fleet, make_tiny_model(tmp_path / "model"))

    busy.send(signal.SIGKILL)

    (record,) = check(fleet, [task.id], within=150)
    assert (record.attempt, record.losses, record.worker) == (2, 1, idle.name)
    assert record.result["steps"] == STEPS
    assert 20 <= record.result["resumed_from_step"] < STEPS


def test_a_training_that_is_handed_back_repeats_no_step(fleet: TestFleet, tmp_path: Path) -> None:
    task, busy, idle = begin(fleet, make_tiny_model(tmp_path / "model"))

    busy.send(signal.SIGTERM)
    eventually(lambda: fleet.registry.find(busy.name).state == "DRAINING", what="the drain")  # type: ignore[union-attr]
    busy.send(signal.SIGTERM)

    assert busy.process.wait(timeout=60) == 0
    (record,) = check(fleet, [task.id], within=150)
    assert (record.attempt, record.preemptions, record.failures, record.worker) == (2, 1, 0, idle.name)
    reached = [
        event.data["current"]
        for event in fleet.app.event_log.read(task.id, count=10_000)
        if event.name == "progress" and "loss" in (event.data.get("metrics") or {})
    ]
    assert record.result["steps"] == STEPS
    assert reached == sorted(set(reached)), "a step was told twice"
