"""Runs inside the pytest that tests/integration/test_testing_plugin.py starts, with a developer's settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import block, gpus, in_thread, say

from gpuflow import BrokerUnavailable, GPUFlowError, NoCapableWorker, app, submit
from gpuflow.settings import Settings, env_names
from gpuflow.spec import parse
from gpuflow.submission_checks import problems_at_submit
from gpuflow.testing import SimGpu


def test_without_a_fixture_nothing_reaches_a_server() -> None:
    with pytest.raises(Exception, match="use-the-fixture-gpuflow_fleet"):
        say.delay("nobody hears")
    with pytest.raises(BrokerUnavailable):
        submit({"taskType": "echo", "echo": {"output": 1}})


def test_no_setting_of_the_developer_gets_in(gpuflow_fleet: Any) -> None:
    worker = gpuflow_fleet.start_worker("jobs")

    seen = in_thread.delay(["GPUFLOW_", "CELERY_", "REDIS_", "CUDA_", "TEAM_"]).get(timeout=gpuflow_fleet.timeout)

    assert "developer" not in str({name: value for name, value in seen.items() if name != "TEAM_VARIABLE"})
    assert seen["TEAM_VARIABLE"] == "of the developer", "what is no setting is kept"
    assert "CUDA_VISIBLE_DEVICES" not in seen and not any(name.startswith("CELERY_BROKER") for name in seen)
    assert app.settings.key_prefix == "" and app.settings.redis_url == gpuflow_fleet.url == seen["REDIS_URL"]
    assert "developer" not in app.conf.broker_url + app.conf.result_backend
    assert Settings.load().task_topic == "tasks", "neither the variables nor gpuflow.toml of the project"
    assert worker.machine.uuids == []
    command = [sys.executable, "-c", "from gpuflow.cli import main; main()", "workers"]
    assert worker.name in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_they_are_back_after_a_fleet(gpuflow_server: Any) -> None:
    with gpuflow_server.fleet():
        assert "GPUFLOW_KEY_PREFIX" not in os.environ
    assert os.environ["GPUFLOW_KEY_PREFIX"] == "developer:"
    assert os.environ["REDIS_URL"] == "redis://developer:1/0"


@pytest.mark.parametrize("number", range(2))
def test_each_begins_with_an_empty_server(gpuflow_fleet: Any, number: int) -> None:
    assert app.redis.keys("*") == []
    sent = say.apply_async(("words",), task_id="the-same-id")
    assert gpuflow_fleet.record(sent).state == "QUEUED"
    with pytest.raises(AssertionError, match=r"within 0 s.*QUEUED"):
        gpuflow_fleet.wait(sent, "RUNNING", within=0)
    warnings = problems_at_submit(app, parse({"taskType": "echo", "echo": {"output": 1}}))
    assert len(warnings) == 1, "told in each test, though it was in the one before"


@pytest.mark.parametrize("workers", [1, 0])
def test_nothing_is_remembered_of_the_fleet_before(gpuflow_fleet: Any, workers: int) -> None:
    for _ in range(workers):
        gpuflow_fleet.start_worker()
    template = {"taskType": "echo", "echo": {"output": 1}, "resources": {"accelerators": "cpu"}}

    if workers:
        assert submit(template, fail_fast=True).get(timeout=gpuflow_fleet.timeout)["output"] == 1
    else:
        with pytest.raises(NoCapableWorker):
            submit(template, fail_fast=True)


def test_a_task_is_waited_for_and_read(gpuflow_fleet: Any) -> None:
    gpuflow_fleet.start_worker("jobs", queues=["tasks", "other"], max_jobs=1, name="mine", env={"TEAM_VARIABLE": "its"})

    sent = say.apply_async(("so it says",), queue="other")

    assert gpuflow_fleet.wait(sent).worker == "mine"
    assert "so it says" in gpuflow_fleet.log(sent.id).splitlines()
    assert in_thread.delay(["TEAM_"]).get(timeout=gpuflow_fleet.timeout) == {"TEAM_VARIABLE": "its"}
    with pytest.raises(AssertionError, match=r"SUCCEEDED.*\n(?s:.*)so it says"):
        gpuflow_fleet.wait(sent, "FAILED")
    gpuflow_fleet.start_worker()  # a worker with -Q takes from these queues alone
    task = submit({"taskType": "echo", "echo": {"output": 1}, "resources": {"accelerators": "cpu"}})
    assert gpuflow_fleet.wait(task, "SUCCEEDED").task_type == "echo"


def test_machines_have_the_gpus_that_were_asked_for(gpuflow_fleet: Any, tmp_path: Path) -> None:
    shared = gpuflow_fleet.machine("2x A100-80GB + T4")
    first = gpuflow_fleet.start_worker("jobs", machine=shared)
    gpuflow_fleet.start_worker("jobs", machine=shared)
    until = tmp_path / "until"

    calls = [gpus.delay(str(until)) for _ in range(3)]
    gpuflow_fleet.wait(calls[0], "RUNNING")
    gpuflow_fleet.wait(calls[1], "RUNNING")
    assert gpuflow_fleet.record(calls[2]).state == "QUEUED"
    until.touch()

    seen = [call.get(timeout=gpuflow_fleet.timeout) for call in calls]
    assert sorted(set(seen)) == sorted(first.machine.uuids[:2])
    with pytest.raises(GPUFlowError, match=r"'A1000'; there are T4, "):
        gpuflow_fleet.start_worker("jobs", machine=["A1000"])


def test_a_machine_without_gpus_takes_none_of_the_developer(gpuflow_fleet: Any) -> None:
    there = gpuflow_fleet.machine("A100-80GB")  # what a driver finds, as on a developer's own machine
    worker = gpuflow_fleet.start_worker("jobs", env=there.env)

    assert worker.machine.uuids == [] and len(there.uuids) == 1
    with pytest.raises(NoCapableWorker):
        submit({"taskType": "echo", "echo": {"output": 1}, "resources": {"accelerators": "A100:1"}}, fail_fast=True)


def test_a_machine_changes_under_its_workers(gpuflow_fleet: Any) -> None:
    cards = [SimGpu(model="A100-80GB", slices=["3g.40gb", "1g.10gb"]), SimGpu(model="A100-40GB", uuid="GPU-mine")]
    worker = gpuflow_fleet.start_worker("jobs", machine=cards)
    assert [uuid[:4] for uuid in worker.machine.uuids] == ["MIG-", "MIG-", "GPU-"]

    worker.machine.become([SimGpu(lost=True), SimGpu(model="A100-40GB", uuid="GPU-mine")])

    assert gpus.delay().get(timeout=gpuflow_fleet.timeout) == "GPU-mine"


def test_what_a_killed_worker_ran_runs_on_another(gpuflow_fleet: Any, tmp_path: Path) -> None:
    first = gpuflow_fleet.start_worker("jobs", env={"GPUFLOW_LEASE_SEC": "2"})
    sent = block.delay(str(tmp_path))
    gpuflow_fleet.wait_for(lambda: list(tmp_path.iterdir()), what="a call that runs")

    first.kill()
    second = gpuflow_fleet.start_worker("jobs")

    gpuflow_fleet.wait_for(lambda: gpuflow_fleet.record(sent).worker == second.name, what="its second attempt")
    assert gpuflow_fleet.wait(sent, "RUNNING").attempt == 2


def test_a_second_fleet_at_once_is_refused(gpuflow_server: Any, gpuflow_fleet: Any) -> None:
    with pytest.raises(GPUFlowError, match="in use already"), gpuflow_server.fleet():
        pass


def test_settings_know_every_variable() -> None:
    assert {"REDIS_URL", "GPUFLOW_KEY_PREFIX"} <= set(env_names().values())
