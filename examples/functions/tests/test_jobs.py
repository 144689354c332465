"""Tests of the team's functions: in this process, and on a worker with two simulated GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from celery import group
from celery.exceptions import TimeLimitExceeded
from my_team.jobs import embed, index, parse

from gpuflow import GPUFlow
from gpuflow.testing import TestFleet


def test_the_chain_in_this_process(gpuflow_eager: GPUFlow, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("one\ntwo\n", encoding="utf-8")

    assert index(str(notes)).delay().get() == 2


def test_calls_at_once_have_a_gpu_each(gpuflow_fleet: TestFleet, tmp_path: Path) -> None:
    worker = gpuflow_fleet.start_worker("my_team.jobs", machine="2x A100-80GB")

    calls = group(embed.s(["one"]), embed.s(["two"])).delay()

    seen = [one["gpus"] for one in calls.get(timeout=gpuflow_fleet.timeout)]
    assert [len(gpus.split(",")) for gpus in seen] == [1, 1]
    assert set(seen) <= set(worker.machine.uuids)


def test_a_limit_ends_a_call_that_blocks(gpuflow_fleet: TestFleet, tmp_path: Path) -> None:
    gpuflow_fleet.start_worker("my_team.jobs")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # to read it is to wait for a writer, and nobody writes

    call = parse.apply_async((str(pipe),), time_limit=1)

    with pytest.raises(TimeLimitExceeded):
        call.get(timeout=gpuflow_fleet.timeout)
    assert gpuflow_fleet.wait(call).state == "FAILED"
