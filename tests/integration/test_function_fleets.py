"""Fleets whose workers run a team's functions in children: GPUs, queues, limits, signatures, sandboxes, deaths."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery.exceptions import SoftTimeLimitExceeded

from gpuflow.errors import InvalidTemplate
from gpuflow.explaining import explain
from tests.support.boxes import Box
from tests.support.bubblewrap import need_bubblewrap
from tests.support.fleet import TestFleet
from tests.support.signing import dead, key_file, signing_env
from tests.support.waiting import eventually, patient


def send(fleet: TestFleet, name: str, *args: Any, **options: Any) -> Any:
    return fleet.app.send_task(f"team_functions.{name}", args=args, **options)


def test_the_limits_of_a_worker_hold_for_functions(fleet: TestFleet) -> None:
    fleet.start_worker("w1", "--include", "team_functions", "--soft-time-limit", "1", "--time-limit", "600")

    with pytest.raises(SoftTimeLimitExceeded):
        send(fleet, "block").get(timeout=patient(30))


def test_a_limit_interrupts_what_a_child_imports(fleet: TestFleet) -> None:
    fleet.start_worker("w1", "--include", "team_slow")

    with pytest.raises(SoftTimeLimitExceeded):
        fleet.app.send_task("team_slow.never", soft_time_limit=1).get(timeout=patient(30))


def test_two_functions_at_once_see_their_own_gpu_alone(fleet: TestFleet, tmp_path: Path) -> None:
    with Box(fleet, "two", "2xA100-80GB") as box:
        box.start("two", "--include", "team_functions")
        until = tmp_path / "go"
        sent = [send(fleet, "gpus", str(until), resources="A100:1") for _ in range(3)]
        begun = eventually(lambda: [one for one in sent if fleet.state(one.id) == "RUNNING"][1:] and sent, what="two")
        assert begun and sorted(fleet.state(one.id) for one in sent).count("QUEUED") == 1
        assert [fleet.app.ledger.get(one.id).task_type for one in sent] == 3 * ["function"]
        until.touch()
        seen = [one.get(timeout=patient(30)) for one in sent]

    assert all(len(gpus) == 1 for gpus, _ in seen)
    assert seen[0][0] != seen[1][0] and len({pid for _, pid in seen}) == 3


def test_explain_names_the_function_that_a_worker_lacks(fleet: TestFleet) -> None:
    with Box(fleet, "bare", "1xA100-80GB") as box:
        box.start("bare")
        sent = send(fleet, "gpus", resources="A100:1")

        (told,) = explain(sent.id, app=fleet.app)

        assert "has no function team_functions.gpus: no module that it was started with (--include)" in str(
            told.to_dict()
        )
        box.start("full", "--include", "team_functions")
        assert len(sent.get(timeout=patient(30))[0]) == 1


def test_the_death_of_a_worker_repeats_nothing_that_is_done(fleet: TestFleet) -> None:
    lease = {"GPUFLOW_LEASE_SEC": "3"}
    worker = fleet.start_worker("w1", "--include", "team_functions", env=lease)
    sent = send(fleet, "block", 600)
    eventually(lambda: fleet.state(sent.id) == "RUNNING", what="a function that runs")
    children = list(psutil.Process(worker.process.pid).children(recursive=True))

    worker.send(signal.SIGKILL)

    eventually(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), what="its end")
    fleet.start_worker("w2", "--include", "team_functions", env=lease)
    eventually(lambda: fleet.app.ledger.get(sent.id).attempt == 2, within=60, what="another attempt")
    fleet.app.cancel_task(sent.id)


def test_a_call_with_gpus_goes_to_the_queue_of_what_it_asks_for(fleet: TestFleet) -> None:
    with Box(fleet, "two", "2xA100-80GB") as box:
        box.start("two", "--include", "team_functions")

        @fleet.app.task(name="team_functions.gpus", resources="A100:1")
        def gpus(until: str = "") -> list[Any]:
            raise AssertionError("it runs in a worker")

        with pytest.raises(InvalidTemplate, match=r"queue 'of-the-team' does not give.*gpu-a100"):
            gpus.apply_async(queue="of-the-team")
        (seen,) = gpus.apply_async(queue="gpu-a100").get(timeout=patient(30))[0]
        assert seen.startswith("GPU-")
        queue = fleet.app.conf.task_default_queue
        with pytest.raises(Exception, match="came by a queue that gives none"):  # this sender does not know the task
            fleet.app.send_task("team_functions.on_gpu", args=(1,), queue=queue).get(timeout=patient(30))
        mapped = {"task": fleet.app.signature("team_functions.in_thread"), "it": []}
        assert fleet.app.send_task("celery.map", kwargs=mapped, resources="A100:1").get(timeout=patient(30)) == []


def test_signed_functions_are_called_again_and_replaced(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path, signing_env(key_file(tmp_path)))
    try:
        fleet.start_worker("w1", "--include", "team_functions,plain_tasks")
        url = "https://bucket.example.com/a"
        assert send(fleet, "third_time", str(tmp_path)).get(timeout=patient(30)) == 20
        assert send(fleet, "with_signature", url).get(timeout=patient(30))[0].startswith(url)
        assert send(fleet, "replaced", "by a chain").get(timeout=patient(30)) == 25
        assert send(fleet, "rejected", True).get(timeout=patient(30)) is True
        assert dead(fleet) == []
    finally:
        fleet.close()


def test_an_isolated_function_has_its_code_and_no_broker(fleet: TestFleet) -> None:
    need_bubblewrap()
    fleet.start_worker("w1", "--include", "team_functions", env={"TEAM_VARIABLE": "x", "GPUFLOW_ISOLATE": "bubblewrap"})

    told = send(fleet, "surroundings").get(timeout=patient(30))

    assert (told["variable"], told["address"]) == (None, None)
    assert send(fleet, "third_time", "/tmp").get(timeout=patient(30)) == 20


def test_a_function_of_the_folder_in_which_the_worker_was_started(fleet: TestFleet) -> None:
    module = fleet.folder / "project_jobs.py"
    module.write_text("from gpuflow import app\n\n\n@app.task(child=True)\ndef where() -> str:\n    return __file__\n")
    # As with the command `celery`, that folder is in the search path while Celery imports, and not after that.
    fleet.start_worker("w1", "--include", "project_jobs", env={"PYTHONSAFEPATH": "1"})

    assert fleet.app.send_task("project_jobs.where").get(timeout=patient(30)) == str(module)
