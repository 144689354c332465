"""A training on two leased GPUs of a worker: a rank that dies ends the attempt, the next one goes on and finishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.faulty_model import make_faulty_model
from tests.fixtures.tiny_model import PAIRS
from tests.support.boxes import Box
from tests.support.fleet import TestFleet
from tests.support.waiting import patient

pytestmark = pytest.mark.ml


def test_a_killed_rank_is_named_and_the_retry_goes_on_from_the_checkpoint(
    fleet: TestFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, environment = make_faulty_model(tmp_path, monkeypatch, kind="kill", rank=1, call=6)
    with Box(fleet, "two", "2xA100-40GB") as box:
        box.start("w1", **environment)

        task = box.submit(
            "A100:2",
            taskType="lora_sft",
            model=model,
            data={"type": "list", "items": [dict(pair) for pair in PAIRS[:16]]},
            training={"max_steps": 8, "batch_size": 2, "save_steps": 2, "logging_steps": 1, "max_length": 64},
            lora={"r": 8, "target_modules": "all-linear"},
            retry={"max_attempts": 2, "backoff_seconds": 0},
        )
        result = task.get(timeout=patient(180))

    assert (result["steps"], result["resumed_from_step"]) == (8, 4)
    events = fleet.app.event_log.read(task.id)
    said = [event.data.get("message") for event in events if event.name == "worker"]
    assert said.count("starting 2 ranks") == 2
    failed, completed = [event.data for event in events if event.name == "finish"]
    assert completed["status"] == "completed"
    error = failed["error"]
    assert (error["type"], error["retryable"]) == ("RankKilled", True)
    assert error["message"].startswith("rank 1 of 2 (process ")
    assert "SIGKILL" in error["message"]
    steps = [event.data["current"] for event in events if event.name == "progress" and "loss" in event.data["metrics"]]
    assert steps == [1, 2, 3, 4, 5, 5, 6, 7, 8]
