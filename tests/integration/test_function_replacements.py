"""What the record of a stage's function says once another has taken its place, or a retry; and who may run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpuflow import PipelineRun, Task, submit, submit_pipeline
from gpuflow.explaining import explain
from gpuflow.traces.context import continuing
from tests.support.boxes import Box
from tests.support.fleet import TestFleet
from tests.support.signing import key_file, signing_env
from tests.support.waiting import eventually, patient

MODULE, GPU_MODULE = "team_stages", "team_stage_gpus"
TENTH = {"hardware": {"cpu": 0.1}}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spec_of(name: str, *args: Any, module: str = MODULE, **fields: Any) -> dict[str, Any]:
    return {"taskType": "function", "function": {"name": f"{module}.{name}", "args": list(args)}, **fields}


def submitted(fleet: TestFleet, spec: dict[str, Any]) -> PipelineRun:
    stages = [{"name": "one", "spec": spec}]
    return submit_pipeline({"apiVersion": "gpuflow/v1", "spec": {"stages": stages}}, app=fleet.app)


def ended(run: PipelineRun) -> Any:
    run.wait(timeout=patient(60))
    return run["one"]


def raw(fleet: TestFleet, task: Task) -> dict[str, str]:
    found: dict[str, str] = fleet.app.redis.hgetall(fleet.app.keys.task(task.id))
    return found


def test_a_replacement_with_gpus_is_tried_again_with_gpus(fleet: TestFleet) -> None:
    with Box(fleet, "one", "1xA100-80GB") as box:
        box.start("w1", "--include", f"{MODULE},{GPU_MODULE}")
        stage = ended(submitted(fleet, spec_of("hands_over", f"{GPU_MODULE}.again_on_gpu", [])))

        assert stage.result["value"] == 1
        record = stage.tasks[0].record()
        assert (record.queue, record.attempt, record.requirement["gpu_count"]) == ("gpu-a100", 3, 1)
        assert record.spec["function"]["name"] == f"{MODULE}.hands_over"
        assert record.runs["function"]["name"] == f"{GPU_MODULE}.again_on_gpu"


def test_a_replacement_keeps_what_it_asks_for(fleet: TestFleet) -> None:
    fleet.start_worker("w1", "--include", MODULE)

    spec = spec_of("hands_over", f"{MODULE}.third_try", [], TENTH, resources={"accelerators": ["A100:1", "cpu"]})
    run = submitted(fleet, spec)
    stage = ended(run)

    record = stage.tasks[0].record()
    assert (stage.result["value"], record.attempt, record.requirement["cpu"]) == ([2, 100], 4, 0.1)
    assert record.queue != "cpu"
    assert not {"alternatives", "fallback_seconds"} & raw(fleet, stage.tasks[0]).keys()


def test_what_is_signed_stays_its_owners_in_every_queue_that_it_may_wait_in(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path, env=signing_env(key_file(tmp_path)))
    try:
        fleet.start_worker("w1", "--include", MODULE)
        asked = {"accelerators": ["A100:1", "cpu"]}
        for spec in (
            spec_of("third_try", resources=asked),
            spec_of("hands_over", f"{MODULE}.third_try", [], {"accelerators": asked["accelerators"]}),
        ):
            sent = submit({"apiVersion": "gpuflow/v1", "metadata": {"owner": "ana"}, "spec": spec}, app=fleet.app)
            assert (sent.wait(timeout=patient(30)).result or {})["value"] == [2, 100]
            headers = json.loads(raw(fleet, sent)["message"])["headers"]
            assert (headers["gpuflow_owner"], headers["gpuflow_queues"]) == ("ana", ["cpu", "gpu-a100"])
    finally:
        fleet.close()


def test_a_part_of_a_list_stays_one_when_it_is_replaced(fleet: TestFleet) -> None:
    fleet.start_worker("w1", "--include", MODULE)
    spec = spec_of("hands_over", f"{MODULE}.same", [[["a"]], [["b", "c"]]])
    spec["function"]["rows"] = 1
    run = submitted(fleet, {**spec, "parallel": {"max_shards": 2}})

    stage = ended(run)
    assert [task["value"] for task in stage.result["results"]] == [[["a"]], [["b", "c"]]]
    assert stage.result["items"] == [["a"], ["b", "c"]]


def test_explain_and_traces_are_of_the_replacement(fleet: TestFleet) -> None:
    fleet.start_worker("w1", "--include", MODULE)
    with continuing(PARENT):
        run = submitted(fleet, spec_of("hands_over", "of_others.jobs.embed", []))
    task = eventually(lambda: run["one"].tasks, what="a task")[0]
    eventually(lambda: task.record().replacement, what="a replacement")

    (waits,) = explain(task.id, app=fleet.app)

    told = "\n".join(waits.to_lines())
    assert "no module that it was started with (--include) registers it" in told and "can start now" not in told
    record = raw(fleet, task)
    assert record["traceparent"].startswith(PARENT[:35])
    assert json.loads(record["message"])["headers"]["traceparent"] == record["traceparent"]
    assert run.cancel()


def test_a_replacement_that_failed_is_queued_again_as_what_it_is(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1", "--include", MODULE)
    until = tmp_path / "until"
    args = [str(tmp_path / "begun"), str(until)]
    sent = submit(spec_of("hands_over", f"{MODULE}.waits", args, TENTH, timeout=4), app=fleet.app)
    failed = sent.wait(timeout=patient(30))
    assert (failed.state, failed.attempt) == ("FAILED", 2)

    until.touch()
    assert sent.retry()

    record = sent.wait(timeout=patient(30))
    assert (record.state, (record.result or {}).get("value"), record.attempt) == ("SUCCEEDED", "done", 3)
    told = fleet.app.redis.hget(f"{fleet.app.settings.key_prefix}queue:{record.queue}", "requirement")
    assert json.loads(str(told))["cpu"] == (record.requirement or {})["cpu"] == 0.1


def test_a_retry_of_a_warm_function_finds_its_session_whatever_else_it_might_ask_for(fleet: TestFleet) -> None:
    with Box(fleet, "one", "1xA100-80GB") as box:
        box.start("w1", "--include", GPU_MODULE)
        asked = {"accelerators": ["H100:1", "A100:1", "cpu"]}
        stage = ended(submitted(fleet, spec_of("again_warm", [], module=GPU_MODULE, resources=asked)))

        first, second = stage.result["value"]
        assert first == second
        queues = [one["queue"] for one in json.loads(raw(fleet, stage.tasks[0])["alternatives"])]
        assert (queues[0], sorted(queues)) == ("gpu-a100", ["cpu", "gpu-a100", "gpu-h100"])


def test_a_worker_of_the_version_before_leaves_it_to_others_and_runs_the_rest(fleet: TestFleet) -> None:
    old = fleet.start_worker("old", "--include", f"{MODULE},older_version")
    runs = [submitted(fleet, spec_of(name, *args)) for name, *args in (["third_try"], ["replaces", "by a function"])]
    eventually(lambda: "delivery_passed_on" in old.log(), what="a message that is left to others")
    assert submit(fleet.echo(output=1), app=fleet.app).wait(timeout=patient(30)).worker == "old"
    task = eventually(lambda: runs[0]["one"].tasks, what="a task")[0]
    assert task.record().attempt == 0
    (told,) = explain(task.id, app=fleet.app)
    assert [one.kind for one in told.workers] == ["outdated"]

    fleet.start_worker("new", "--include", MODULE)

    assert [ended(run).result["value"] for run in runs] == [[2, 100], [11, 12]]
    assert {entry.worker for run in runs for entry in run["one"].tasks[0].attempts()} == {"new"}
