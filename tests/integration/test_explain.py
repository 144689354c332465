"""Why a task waits, asked of a real fleet on simulated machines and one broker; from Python and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpuflow
from gpuflow.client import submit, submit_pipeline
from gpuflow.routing.explain import Explanation
from tests.fixtures.simulated_nvml import simulated_machine
from tests.gate import leftovers
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient


def ask(fleet: TestFleet, accelerators: Any, **echo: Any) -> dict[str, Any]:
    return {**fleet.echo(**echo), "resources": {"accelerators": accelerators}}


def box(folder: Path, name: str, machine: str) -> Any:
    (folder / name).mkdir()
    return simulated_machine(folder / name, machine)


def explained(fleet: TestFleet, source: Any) -> Explanation:
    (one,) = gpuflow.explain(source, app=fleet.app)
    return one


def command(fleet: TestFleet, folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", "from gpuflow.cli import main; main()", *arguments],
        cwd=folder,
        env={
            **environment,
            **leftovers.passed_on(),
            "REDIS_URL": fleet.broker.url,
            "GPUFLOW_STATE_DIR": str(folder / "state"),
        },
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_without_a_worker_the_place_in_the_queue_is_told(fleet: TestFleet) -> None:
    first, second, urgent = (
        submit({**ask(fleet, "A100:1"), "priority": priority}, app=fleet.app) for priority in (5, 5, 9)
    )

    found = [explained(fleet, task.id) for task in (urgent, first, second)]

    assert [one.queue.place for one in found] == [1, 2, 3]
    assert {one.queue.depth for one in found} == {3}
    assert {one.outcome for one in found} == {"cannot"}
    assert found[0].queue.oldest_seconds is not None
    assert found[0].queue.oldest_seconds < 60
    assert found[2].verdict == "cannot start: no worker is there; start one with `celery -A gpuflow worker`"


def test_who_is_busy_with_what_who_is_kept_away_and_who_misses_what(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("a100", env=box(tmp_path, "a", "1xA100-80GB"))
    fleet.start_worker("only-h100", "-Q", "gpu-h100", env=box(tmp_path, "b", "1xA100-80GB"))
    fleet.start_worker("little", env=box(tmp_path, "c", "1xL4"))
    running = submit(ask(fleet, "A100:1", sleep_seconds=600), app=fleet.app)
    eventually(lambda: explained(fleet, running.id).outcome == "runs", what="the first task runs")
    waiting = submit(ask(fleet, "A100-80GB:1"), app=fleet.app)

    found = eventually(
        lambda: (one := explained(fleet, waiting.id)).workers[0].tasks and one, what="the registry tells of the task"
    )

    kinds = {one.worker: one.kind for one in found.workers}
    assert kinds == {"a100": "busy", "only-h100": "restricted", "little": "unfit"}
    assert found.outcome == "waits"
    assert running.id in found.workers[0].text
    assert "only-h100" in "\n".join(found.to_lines())
    assert "asks for a100, the worker has 1x l4" in found.others[0].text
    running.cancel()
    waiting.cancel()
    assert eventually(lambda: explained(fleet, waiting.id).outcome == "ended")


def test_submit_warns_refuses_and_chooses_where(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1", "-Q", "cpu", env=box(tmp_path, "a", "1xL4"))
    stages = [
        {"name": "big", "spec": {"resources": {"accelerators": "H100:1"}}},
        {"name": "small", "spec": {"resources": {"hardware": {"cpu": 1}}}},
    ]
    template = {"apiVersion": "gpuflow/v1", "spec": {"taskType": "echo", "stages": stages}}
    (tmp_path / "t.json").write_text(json.dumps(template))

    refused = command(fleet, tmp_path, "submit", "t.json", "--fail-fast", code=1)
    warned = command(fleet, tmp_path, "submit", "t.json")
    shown = command(fleet, tmp_path, "explain", "t.json").stdout

    assert refused.stdout == ""
    assert "no live worker can run 'big': the nearest is w1, but the task asks for h100" in refused.stderr
    assert [line for line in warned.stderr.splitlines() if line.startswith("warning: ")] == [
        "warning: " + refused.stderr.strip().removeprefix("gpuflow: ").removesuffix("; nothing was submitted")
    ]
    assert len(warned.stdout.split()) == 1
    assert "big: cannot start: the only worker, w1, cannot run it" in shown
    assert "small: can start now: w1 is free" in shown
    kept = {"taskType": "echo", "resources": {"accelerators": "L4:1"}}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    told = command(fleet, tmp_path, "submit", "kept.json").stderr
    assert "only their -Q keeps w1 from running" in told
    assert "-Q gpu-l4" in told


def test_target_auto_runs_here_what_no_live_worker_serves(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1", "-Q", "gpu-l4", env=box(tmp_path, "a", "1xL4"))
    (tmp_path / "cpu.json").write_text(json.dumps({"taskType": "echo", "resources": {"hardware": {"cpu": 1}}}))
    (tmp_path / "gpu.json").write_text(json.dumps({"taskType": "echo", "resources": {"accelerators": "L4:1"}}))

    here = command(fleet, tmp_path, "submit", "cpu.json", "--target", "auto")
    sent = command(fleet, tmp_path, "submit", "gpu.json", "--target", "auto", "--wait")

    assert "starting a local worker" in here.stderr
    assert "starting a local worker" not in sent.stderr


def test_a_pipeline_is_explained_task_by_task(fleet: TestFleet) -> None:
    run = submit_pipeline(
        {"apiVersion": "gpuflow/v1", "spec": {"taskType": "echo", "stages": [{"name": "one", "spec": {}}]}},
        app=fleet.app,
    )
    assert [one.outcome for one in gpuflow.explain(fleet.echo(), app=fleet.app)] == ["cannot"]
    fleet.start_worker("w1")
    eventually(lambda: run.state.final, within=60)
    found = gpuflow.explain(run.id, app=fleet.app)
    assert [one.outcome for one in found] == ["ended"]


def test_what_keeps_a_worker_that_is_there_is_told_before_one_that_has_stopped(fleet: TestFleet) -> None:
    quick = {"HEARTBEAT_INTERVAL_SEC": "1"}
    fleet.start_worker("before", env=quick).stop()
    closed = fleet.start_worker("closed", env={**quick, "GPUFLOW_ALLOW_CODE": "none"})
    fleet.start_worker("full", env={**quick, "GPUFLOW_ALLOW_CODE": "none", "GPUFLOW_DISK_FLOOR_BYTES": str(2**60)})
    spec = {"taskType": "command", "command": {"command": "true"}, "resources": {"hardware": {"cpu": 1}}}
    task = submit(spec, app=fleet.app)

    found = explained(fleet, task.id)

    assert [(one.worker, one.kind) for one in found.workers] == [
        ("closed", "not_allowed"),
        ("full", "disk_full"),
        ("before", "offline"),
    ]
    assert "1 closed to its code or secrets, 1 short of disk" in found.verdict
    assert found.verdict.endswith("; start another one, such as before, which has stopped")
    closed.stop()
    found = explained(fleet, task.id)
    assert [one.worker for one in found.workers] == ["full", "before"], "as it was, it would not take the task"
    assert found.verdict.startswith("cannot start: the only capable worker left, full, has ")
    fleet.workers[-1].stop()
    assert explained(fleet, task.id).verdict.startswith("cannot start: the only capable worker before has stopped: ")
