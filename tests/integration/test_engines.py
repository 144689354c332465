"""Which worker, and there which Python, runs a task that names its engine: environments that come, go and break.

Their Python is a script that speaks the events; no large library and no pip.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.client import submit
from gpuflow.errors import NoCapableWorker
from gpuflow.explaining import explain
from tests.support.engines import build
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

FAST = {"HEARTBEAT_INTERVAL_SEC": "1", "GPUFLOW_SESSION_IDLE_SEC": "0"}
ANSWERS = """#!/bin/sh
cat > /dev/null
echo '{"event": "connection", "status": "connected"}'
echo "{\\"event\\": \\"result\\", \\"value\\": {\\"items\\": [], \\"environment\\": \\"$GPUFLOW_ENVIRONMENT\\"}}"
echo '{"event": "finish", "status": "completed"}'
"""
CANNOT_BEGIN = """#!/bin/sh
echo 'ImportError: libc.so.7' >&2
exit 1
"""


def ask(**fields: object) -> dict[str, object]:
    return {
        "taskType": "inference",
        "model": {"source": {"type": "local", "identifier": "/nowhere"}},
        "data": {"type": "list", "items": ["Hello"]},
        "resources": {"hardware": {"gpu": {"count": 0}}},
        **fields,
    }


def test_an_engine_that_is_named_waits_for_a_worker_that_has_it(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("without", env={"GPUFLOW_ENV_DIR": str(tmp_path / "none"), **FAST})
    task = submit(ask(engine="vllm"), app=fleet.app)
    assert (
        submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))["output"] == 1
    )  # the worker looks past it

    (told,) = explain(task.id, app=fleet.app)

    assert task.state == "QUEUED"
    assert "without has no executor inference by engine vllm: environment vllm (cpu) is not built" in told.verdict
    assert told.verdict.endswith("run `gpuflow env create vllm --variant cpu` on the machine of without")
    with pytest.raises(NoCapableWorker, match="run `gpuflow env create vllm --variant cpu` there"):
        submit(ask(engine="vllm"), app=fleet.app, fail_fast=True)

    build(tmp_path / "some", ANSWERS)
    fleet.start_worker("with", env={"GPUFLOW_ENV_DIR": str(tmp_path / "some"), **FAST})

    result = task.get(timeout=patient(30))
    assert (result["engine"], result["environment"]) == ("vllm", "vllm")
    assert (task.record().worker, task.record().attempt) == ("with", 1)


def test_an_environment_that_is_built_meanwhile_counts_without_a_restart(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1", env={"GPUFLOW_ENV_DIR": str(tmp_path), **FAST})
    task = submit(ask(engine="vllm"), app=fleet.app)
    named = submit(ask(environment="vllm"), app=fleet.app)
    assert task.state == "QUEUED"

    build(tmp_path, ANSWERS)

    assert task.get(timeout=patient(30))["engine"] == "vllm"
    assert named.get(timeout=patient(30))["engine"] == "vllm"


def test_one_that_breaks_fails_the_attempt_not_the_worker_and_is_offered_no_more(
    fleet: TestFleet, tmp_path: Path
) -> None:
    build(tmp_path, CANNOT_BEGIN)
    worker = fleet.start_worker("w1", env={"GPUFLOW_ENV_DIR": str(tmp_path), **FAST})
    task = submit(ask(engine="vllm", retry={"backoff_seconds": 0}), app=fleet.app)

    eventually(lambda: task.record().failures == 1, what="the first attempt to fail")

    assert worker.process.poll() is None
    assert submit(fleet.echo(output=1), app=fleet.app).get(timeout=patient(30))["output"] == 1
    broken = "cannot be used: a child could not begin in it; run `gpuflow env create vllm"
    eventually(lambda: broken in explain(task.id, app=fleet.app)[0].verdict, what="the worker to tell")
    assert task.state == "QUEUED"

    build(tmp_path, ANSWERS)

    assert task.get(timeout=patient(30))["engine"] == "vllm"
    assert task.record().attempt == 2
