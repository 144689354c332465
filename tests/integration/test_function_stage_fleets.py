"""Stages that call functions on fleets: GPUs of their own, warm ones, workers with the function and without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gpuflow import PipelineRun, submit, submit_pipeline
from gpuflow.errors import InvalidTemplate, TaskFailed
from tests.support.boxes import Box
from tests.support.bubblewrap import need_bubblewrap
from tests.support.fleet import TestFleet
from tests.support.signing import key_file, signing_env
from tests.support.waiting import eventually, patient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import team_stage_gpus  # registers its tasks for the app of the fleet, too

MODULE, GPU_MODULE = "team_stages", team_stage_gpus.__name__


def spec_of(name: str, *args: Any, module: str = MODULE, **fields: Any) -> dict[str, Any]:
    return {"taskType": "function", "function": {"name": f"{module}.{name}", "args": list(args)}, **fields}


def submitted(fleet: TestFleet, spec: dict[str, Any], **stage: Any) -> PipelineRun:
    stages = [{"name": "one", "spec": spec, **stage}]
    return submit_pipeline({"apiVersion": "gpuflow/v1", "spec": {"stages": stages}}, app=fleet.app)


def result_of(run: PipelineRun) -> dict[str, Any]:
    run.wait(timeout=patient(60))
    result = run["one"].result
    assert result is not None
    return result


def test_what_the_decorator_asks_for_is_the_default_where_it_is_known(fleet: TestFleet) -> None:
    with Box(fleet, "two", "2xA100-80GB") as box:
        box.start("w1", "--include", GPU_MODULE)
        known, said = (
            submitted(fleet, spec_of("on_gpu", module=GPU_MODULE)),
            submitted(fleet, spec_of("on_gpu", module=GPU_MODULE, resources="A100:2")),
        )
        assert [len(result_of(run)["value"]) for run in (known, said)] == [1, 2]
        assert known.record().template["stages"][0]["spec"]["resources"] == {"accelerators": "A100:1"}

        deliberate = submitted(fleet, spec_of("on_gpu", module=GPU_MODULE, resources="cpu"))
        assert result_of(deliberate)["value"] == []


def test_a_warm_function_keeps_its_gpu_for_the_calls_of_a_stage(fleet: TestFleet) -> None:
    with Box(fleet, "one", "1xA100-80GB") as box:
        box.start("w1", "--include", GPU_MODULE)
        run = submitted(fleet, spec_of("warm_on_gpu", 0, module=GPU_MODULE), matrix={"function.args[0]": [1, 2, 3, 4]})

        answers = [task["value"] for task in result_of(run)["results"]]
        assert len({answer["pid"] for answer in answers}) == 1 and all(len(one["gpus"]) == 1 for one in answers)


def test_what_is_signed_is_called_and_retried(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path, env=signing_env(key_file(tmp_path)))
    try:
        fleet.start_worker("w1", "--include", MODULE)
        assert result_of(submitted(fleet, spec_of("third_try")))["value"] == [2, 100]
        assert result_of(submitted(fleet, spec_of("replaces", "by a function")))["value"] == [11, 12]
    finally:
        fleet.close()


def test_a_large_argument_goes_by_the_store_and_not_into_the_record(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path, env={"GPUFLOW_STORE_URL": (tmp_path / "store").as_uri()})
    try:
        fleet.start_worker("w1", "--include", MODULE)
        stages = [
            {"name": "make", "spec": spec_of("words", "word", 300_000)},
            {"name": "one", "spec": spec_of("lengths", "${make.result.value}")},
        ]
        run = submit_pipeline({"apiVersion": "gpuflow/v1", "spec": {"stages": stages}}, app=fleet.app)
        assert result_of(run)["value"] == [4] * 300_000
        assert set(run["one"].tasks[0].record().spec["function"]) == {"name", "arguments"}

        with pytest.raises(InvalidTemplate, match="the arguments of its function have 11 MiB"):
            submitted(fleet, spec_of("same", "x" * (11 << 20)))
    finally:
        fleet.close()


def test_a_worker_without_the_function_starts_the_stage_for_one_that_has_it(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("without")
    warm = submitted(fleet, spec_of("warm", 0), matrix={"function.args[0]": [1, 2, 3]})
    eventually(lambda: len(warm["one"].tasks) == 3, what="a stage that was started by a worker without the function")
    retried = submitted(fleet, spec_of("third_try"))
    eventually(lambda: retried["one"].tasks, what="the other one")

    fleet.start_worker("has", "--include", MODULE)

    assert len({task["value"]["pid"] for task in result_of(warm)["results"]}) == 1
    assert result_of(retried)["value"] == [2, 100]
    workers = {entry.worker for task in retried["one"].tasks for entry in task.attempts()}
    assert workers == {"has"}


def test_a_resumed_pipeline_calls_what_is_not_done(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1", "--include", MODULE)
    begun, until = tmp_path / "begun", tmp_path / "until"
    run = submitted(fleet, spec_of("waits", str(begun), str(until), timeout=4))
    with pytest.raises(TaskFailed):
        run.wait(timeout=patient(60))
    # On a slow machine the time was over before the first call.
    calls = begun.read_text().count("\n") if begun.exists() else 0

    until.touch()
    assert run.resume() == "resumed"

    assert result_of(run)["value"] == "done" and begun.read_text().count("\n") == calls + 1


def test_a_call_that_failed_is_queued_again(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1", "--include", MODULE)
    until = tmp_path / "until"
    sent = submit(spec_of("waits", str(tmp_path / "begun"), str(until), timeout=1), app=fleet.app)
    assert sent.wait(timeout=patient(30)).state == "FAILED"

    until.touch()
    assert sent.retry()

    record = sent.wait(timeout=patient(30))
    assert (record.state, (record.result or {}).get("value"), record.attempt) == ("SUCCEEDED", "done", 2)


def test_isolated_functions_end_as_any(fleet: TestFleet, tmp_path: Path) -> None:
    need_bubblewrap()
    fleet.start_worker("w1", "--include", MODULE, env={"GPUFLOW_ISOLATE": "bubblewrap"})
    calls = [spec_of("third_try"), spec_of("replaces", "by a function"), spec_of("ends", "ignore"), spec_of("warm", 3)]
    runs = [submit_pipeline(call, owner="ana", app=fleet.app) for call in calls]

    values = []
    for run in runs:
        run.wait(timeout=patient(60))
        (stage,) = run.record().stages
        values.append((run[stage].result or {})["value"])

    assert values[:3] == [[2, 100], [11, 12], None] and values[3]["number"] == 3
