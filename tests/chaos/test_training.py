"""A real training (TRL and PEFT on a tiny model) loses its worker, or is drained away: it goes on, and ends once.

With a shared results folder, and on machines that share no disk, by the task's store.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.artifacts.store import RESERVED_PREFIX
from gpuflow.client import Task, submit
from gpuflow.protocol import CHECKPOINT_MARKER
from tests.chaos.accounting import check
from tests.chaos.conftest import LEASE
from tests.fixtures.tiny_model import PAIRS, make_tiny_model
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import eventually, patient

pytestmark = pytest.mark.ml

STEPS = 150
#: Steps of the trainings whose checkpoints are sent away while they run.
LONG = 400


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


@pytest.mark.long
def test_a_training_survives_kill_9_of_its_worker(fleet: TestFleet, tmp_path: Path) -> None:
    task, busy, idle = begin(fleet, make_tiny_model(tmp_path / "model"))

    busy.send(signal.SIGKILL)

    (record,) = check(fleet, [task.id], within=150)
    assert (record.attempt, record.losses, record.worker) == (2, 1, idle.name)
    assert record.result["steps"] == STEPS
    assert 20 <= record.result["resumed_from_step"] < STEPS


@pytest.mark.long
def test_a_training_that_is_handed_back_repeats_no_step(fleet: TestFleet, tmp_path: Path) -> None:
    task, busy, idle = begin(fleet, make_tiny_model(tmp_path / "model"))

    busy.send(signal.SIGTERM)
    eventually(lambda: fleet.registry.find(busy.name).state == "DRAINING", what="the drain")  # type: ignore[union-attr]
    busy.send(signal.SIGTERM)

    assert busy.process.wait(timeout=patient(60)) == 0
    (record,) = check(fleet, [task.id], within=150)
    assert (record.attempt, record.preemptions, record.failures, record.worker) == (2, 1, 0, idle.name)
    assert record.result["steps"] == STEPS
    reached = told(fleet, task)
    assert reached == sorted(set(reached)), "a step was told twice"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    folder = tmp_path / "gateway"
    folder.mkdir()
    with Gateway(folder) as made:
        yield made


def begin_apart(fleet: TestFleet, model: Path, gateway: Gateway, **fields: Any) -> tuple[Task, WorkerProcess]:
    """Start a training on a worker with folders of its own, and another worker; results go to the gateway."""
    there = {"GPUFLOW_WORKER_TOKEN": TOKEN, "GPUFLOW_GATEWAY_URL": gateway.url}
    away = {name: str(fleet.folder / "away" / name.lower()) for name in ("RESULTS_DIR", "GPUFLOW_CACHE_DIR")}
    first = fleet.start_worker("w1", "--max-jobs", "1", env={**LEASE, **there, **away})
    spec = training(model)
    spec["training"] |= {"max_steps": LONG, **fields}
    task = submit({**spec, "output": {"destination": {"type": "http"}}}, app=fleet.app)
    eventually(lambda: task.record().worker == "w1", what="the first attempt")
    fleet.start_worker("w2", "--max-jobs", "1", env={**LEASE, **there})
    return task, first


def stored_steps(gateway: Gateway, task: Task) -> list[int]:
    """Return the steps of the complete checkpoints in the store."""
    markers = gateway.root.glob(f"{task.id}/attempt-*/checkpoints/*/{CHECKPOINT_MARKER}")
    return sorted(int(marker.parent.name.rpartition("-")[2]) for marker in markers)


def stored_files(gateway: Gateway, task: Task) -> list[Path]:
    """Return the files of checkpoints in the store, without those of uploads that were broken off."""
    found = gateway.root.glob(f"{task.id}/*/checkpoints/**/*")
    return [path for path in found if path.is_file() and not path.name.startswith(RESERVED_PREFIX)]


def told(fleet: TestFleet, task: Task) -> list[float]:
    """Return the steps whose loss was told, in order."""
    return [
        event.data["current"]
        for event in fleet.app.event_log.read(task.id, count=10_000)
        if event.name == "progress" and "loss" in (event.data.get("metrics") or {})
    ]


def test_a_training_survives_kill_9_on_machines_that_share_no_disk(
    fleet: TestFleet, tmp_path: Path, gateway: Gateway
) -> None:
    task, first = begin_apart(fleet, make_tiny_model(tmp_path / "model"), gateway)
    eventually(lambda: len(stored_steps(gateway, task)) >= 2, within=120, what="the second checkpoint in the store")
    stored = stored_steps(gateway, task)[-1]

    first.send(signal.SIGKILL)

    (record,) = check(fleet, [task.id], within=150)
    assert (record.attempt, record.losses, record.worker) == (2, 1, "w2")
    assert record.result["steps"] == LONG
    assert 20 <= stored <= record.result["resumed_from_step"] < LONG
    eventually(lambda: not stored_files(gateway, task), what="no checkpoint in the store")
    assert (gateway.root / task.id / "attempt-2" / "manifest.json").is_file()
    assert not (fleet.results / task.id / "fetched").exists()


def test_a_training_that_is_handed_back_to_another_machine_repeats_no_step(
    fleet: TestFleet, tmp_path: Path, gateway: Gateway
) -> None:
    task, first = begin_apart(fleet, make_tiny_model(tmp_path / "model"), gateway, save_steps=100_000)
    eventually(lambda: step(task) >= 10, within=120, what="step 10")

    first.send(signal.SIGTERM)
    eventually(lambda: fleet.registry.find("w1").state == "DRAINING", what="the drain")  # type: ignore[union-attr]
    first.send(signal.SIGTERM)

    assert first.process.wait(timeout=patient(60)) == 0
    (record,) = check(fleet, [task.id], within=150)
    assert (record.attempt, record.preemptions, record.failures, record.worker) == (2, 1, 0, "w2")
    assert record.result["steps"] == LONG
    reached = told(fleet, task)
    assert reached == sorted(set(reached)), "a step was told twice"
    assert record.result["resumed_from_step"] >= 10
    eventually(lambda: not stored_files(gateway, task), what="no checkpoint in the store")
