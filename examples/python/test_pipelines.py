"""Tests of pipelines, on a real fleet that pytest starts once: `pytest examples/python`.

Copy the fixture into the conftest.py of your project. It needs no Redis, no Docker and no GPU: `echo` stands for work
that is not under test, and `--set` or a dict changes a template where a test needs it smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuflow import GPUFlow, InvalidTemplate, TaskCancelled, TaskFailed, local_fleet, submit, submit_pipeline

SECONDS = 120.0
CPU = {"accelerators": "cpu"}


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GPUFlow]:
    """A broker and a worker for all tests of the session; nothing of them is left afterwards."""
    with local_fleet(tmp_path_factory.mktemp("fleet"), max_jobs=2) as app:
        yield app


def test_a_graph_joins_its_branches(fleet: GPUFlow) -> None:
    run = submit_pipeline("graph", app=fleet).wait(timeout=SECONDS)

    joined = run["join"].result
    assert joined is not None
    assert joined["output"] == [2, 3]


def test_a_failure_names_the_stage_and_reaches_what_depends_on_it(fleet: GPUFlow) -> None:
    stages = [
        {"name": "load", "spec": {"echo": {"fail": {"type": "BadInput", "message": "no such column"}}}},
        {"name": "train", "spec": {"echo": {"output": 1}}},
    ]
    template = {"apiVersion": "gpuflow/v1", "spec": {"taskType": "echo", "resources": CPU, "stages": stages}}

    run = submit_pipeline(template, app=fleet)
    with pytest.raises(TaskFailed, match="stage 'load' failed: no such column"):
        run.wait(timeout=SECONDS)

    assert [run["load"].state, run["train"].state] == ["FAILED", "FAILED"]


def test_a_mistake_is_found_before_anything_runs(fleet: GPUFlow) -> None:
    with pytest.raises(InvalidTemplate, match="temprature"):
        submit({"taskType": "inference", "inference": {"temprature": 0}}, app=fleet)


def test_what_runs_can_be_cancelled(fleet: GPUFlow) -> None:
    task = submit({"taskType": "echo", "echo": {"sleep_seconds": 600}, "resources": CPU}, app=fleet)

    task.cancel()

    with pytest.raises(TaskCancelled):
        task.get(timeout=SECONDS)
