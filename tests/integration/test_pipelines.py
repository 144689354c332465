"""Pipelines by a real worker process: order, references, failure, cancel, resume."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import get, submit, submit_pipeline
from gpuflow.errors import InvalidTemplate, TaskFailed
from tests.support.fleet import TestFleet, gone
from tests.support.waiting import eventually, patient


def node(name: str, *needs: str, **echo: Any) -> dict[str, Any]:
    return {"name": name, "dependsOn": list(needs), "spec": {"taskType": "echo", "echo": echo}}


def graph(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "gpuflow/v1",
        "kind": "Pipeline",
        "metadata": {"name": "test"},
        "spec": {"taskType": "echo", "graph": {"nodes": list(nodes)}},
    }


def started_at(run: Any, stage: str) -> float:
    return min(task.record().started_at for task in run[stage].tasks)


def test_two_stages_run_in_order_and_pass_values(served: TestFleet) -> None:
    run = submit_pipeline(
        {
            "apiVersion": "gpuflow/v1",
            "kind": "Pipeline",
            "metadata": {"name": "two"},
            "spec": {
                "taskType": "echo",
                "stages": [
                    {
                        "name": "first",
                        "spec": {"data": {"type": "list", "items": ["a", "b"]}, "echo": {"output": {"n": 7}}},
                    },
                    {
                        "name": "second",
                        "spec": {
                            "echo": {
                                "output": {
                                    "whole": "${first.result.output}",
                                    "text": "n=${first.output.n}",
                                    "item": "${first.items[1].output}",
                                }
                            }
                        },
                    },
                ],
            },
        },
        app=served.app,
    )

    run.wait(timeout=patient(60))

    assert run["second"].result["output"] == {"whole": {"n": 7}, "text": "n=7", "item": "b"}
    assert started_at(run, "second") >= run["first"].tasks[0].record().finished_at


def test_a_diamond_runs_in_order(served: TestFleet) -> None:
    run = submit_pipeline(
        graph(
            node("a", output=1),
            node("b", "a", output="${a.output}"),
            node("c", "a", output=[1, {"x": "${a.result.output}"}]),
            node("d", "b", "c", output={"b": "${b.output}", "c": "${c.output[1].x}"}),
        ),
        app=served.app,
    ).wait(timeout=patient(60))

    assert run["d"].result["output"] == {"b": 1, "c": 1}
    assert started_at(run, "d") >= max(run[name].tasks[0].record().finished_at for name in "bc")


def test_a_failed_stage_fails_all_its_descendants_with_the_cause_and_resume_runs_only_the_rest(
    served: TestFleet,
) -> None:
    worker = served.workers[0]
    marker = served.folder / "mended"
    run = submit_pipeline(
        graph(
            node("a", output=1),
            node("b", "a", fail={"type": "Broken", "message": "no luck", "unless_exists": str(marker)}),
            node("c", "b", output="${b.output}"),
            node("d", "c", output=4),
            node("side", "a", output=5),
        ),
        app=served.app,
    )

    with pytest.raises(TaskFailed, match="stage 'b' failed: no luck"):
        run.wait(timeout=patient(60))

    status = {stage["name"]: stage for stage in run.status()["stages"]}
    assert {name: stage["state"] for name, stage in status.items()} == {
        "a": "SUCCEEDED",
        "b": "FAILED",
        "c": "FAILED",
        "d": "FAILED",
        "side": "SUCCEEDED",
    }
    for name in ("c", "d"):
        assert status[name]["error"]["cause"]["stage"] == "b"
        assert "no luck" in status[name]["error"]["message"]
        assert status[name]["tasks"] == []
    first = {name: [task.id for task in run[name].tasks] for name in ("a", "side")}

    marker.touch()
    assert run.resume() == "resumed"
    run.wait(timeout=patient(60))

    assert {name: [task.id for task in run[name].tasks] for name in ("a", "side")} == first
    assert all(task.record().attempt == 1 for name in first for task in run[name].tasks)
    assert run["d"].result["output"] == 4
    assert worker.process.poll() is None


def test_a_missing_value_fails_the_stage_and_names_the_path(served: TestFleet) -> None:
    run = submit_pipeline(graph(node("a", output={"x": 1}), node("b", "a", output="${a.output.y}")), app=served.app)

    with pytest.raises(TaskFailed, match=r"a\.output\.y"):
        run.wait(timeout=patient(60))


def test_bad_references_are_refused_at_submit(fleet: TestFleet) -> None:
    with pytest.raises(InvalidTemplate, match="nowhere"):
        submit_pipeline(graph(node("a", output="${nowhere.x}")), app=fleet.app)
    with pytest.raises(InvalidTemplate, match="cycle"):
        submit_pipeline(graph(node("a", "b"), node("b", "a")), app=fleet.app)
    assert fleet.broker.client.keys("pipeline:*") == []


def test_a_matrix_and_shards_are_collected_in_order(served: TestFleet) -> None:
    wide = node("wide", output=1)
    wide["matrix"] = {"echo.output": [10, 20, 30]}
    sharded = node("sharded")
    sharded["spec"]["data"] = {"type": "list", "items": [f"item-{n}" for n in range(10)]}
    sharded["spec"]["parallel"] = {"enabled": True, "max_shards": 4}
    run = submit_pipeline(
        graph(wide, sharded, node("end", "wide", "sharded", output="${wide.results[2].output}")), app=served.app
    ).wait(timeout=patient(90))

    assert [result["output"] for result in run["wide"].result["results"]] == [10, 20, 30]
    assert len(run["sharded"].tasks) == 4
    items = run["sharded"].result["items"]
    assert [item["output"] for item in items] == [f"item-{n}" for n in range(10)]
    assert [item["index"] for item in items] == list(range(10))
    assert run["end"].result["output"] == 30


def test_cancel_stops_what_runs_and_starts_nothing_more(fleet: TestFleet) -> None:
    worker = fleet.start_worker("w1")
    run = submit_pipeline(graph(node("a", sleep_seconds=3600), node("b", "a", output=1)), app=fleet.app)
    eventually(lambda: run["a"].tasks and run["a"].tasks[0].state == "RUNNING")
    tree = [process.pid for process in worker.children() if process.ppid() != worker.pid]

    assert run.cancel()

    eventually(lambda: run["a"].tasks[0].state == "CANCELLED")
    gone(tree)
    assert run.state == "CANCELLED"
    assert run["b"].tasks == []


def test_the_join_completes_while_the_only_worker_is_busy(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1", "--max-jobs", "1")
    gate = tmp_path / "gate"
    run = submit_pipeline(graph(node("a", output=1, until_exists=str(gate))), app=fleet.app)
    eventually(lambda: run["a"].tasks and run["a"].tasks[0].state == "RUNNING")
    long = submit({**fleet.echo(sleep_seconds=3600), "priority": 4}, app=fleet.app)
    gate.touch()
    eventually(lambda: long.state == "RUNNING")
    second = submit_pipeline(graph(node("a", output=1), node("b", "a", output=2)), app=fleet.app)

    run.wait(timeout=patient(20))
    eventually(lambda: second["a"].tasks)

    assert long.state == "RUNNING"
    assert second["a"].tasks[0].state == "QUEUED"
    long.cancel()
    second.wait(timeout=patient(30))


def test_a_pipeline_goes_on_after_its_worker_was_killed(fleet: TestFleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    lease = {"GPUFLOW_LEASE_SEC": "2"}
    worker = fleet.start_worker("w1", env=lease)
    run = submit_pipeline(
        graph(node("a", until_exists=str(gate), output=1), node("b", "a", output="${a.output}")), app=fleet.app
    )
    eventually(lambda: run["a"].tasks and run["a"].tasks[0].state == "RUNNING")

    worker.send(signal.SIGKILL)
    gate.touch()
    fleet.start_worker("w2", env=lease)

    run.wait(timeout=patient(60))
    assert run["b"].result["output"] == 1
    assert run["a"].tasks[0].record().attempt == 2


def test_get_finds_a_pipeline_and_events_tell_its_story(served: TestFleet) -> None:
    run = submit_pipeline(graph(node("a", steps=2, output=1)), app=served.app)

    same = get(run.id, app=served.app)
    names = {event.name for event in same.events()}

    assert {"state", "stage", "progress"} <= names
    assert same.state == "SUCCEEDED"


def conditional(name: str, condition: dict[str, Any], *needs: str, **echo: Any) -> dict[str, Any]:
    return {**node(name, *needs, **echo), "condition": condition}


def test_a_stage_runs_only_if_its_condition_holds(served: TestFleet) -> None:
    run = submit_pipeline(
        graph(
            node("first", output={"score": 0.4, "verdict": "skip"}),
            conditional("good", {"value": "${first.output.score}", "at_least": 0.3}, output="ran"),
            conditional("better", {"value": "${first.output.score}", "at_least": 0.5}, output="never"),
            node("after", "better", output="never"),
            node("reads", "first", output="${better.result.output}"),
            node("last", "good", "better", output="${good.result.output}"),
            conditional("told", {"value": "${better.result.output}", "exists": False}, output="nothing there"),
        ),
        app=served.app,
    )

    run.wait(timeout=patient(60))

    states = {stage["name"]: (stage["state"], stage["reason"]) for stage in run.status()["stages"]}
    assert {name: state for name, (state, _) in states.items()} == {
        "first": "SUCCEEDED", "good": "SUCCEEDED", "better": "SKIPPED", "after": "SKIPPED", "reads": "SKIPPED",
        "last": "SUCCEEDED", "told": "SUCCEEDED",
    }  # fmt: skip
    assert states["better"][1] == "its condition does not hold: ${first.output.score} is 0.4, not at least 0.5"
    assert states["reads"][1] == "it reads the result of stage 'better', which was skipped"
    assert (run["last"].result or {})["output"] == "ran"
    assert run["better"].result is None and run["better"].tasks == []
    told = [event.data for event in run.events() if event.name == "stage" and event.data["state"] == "SKIPPED"]
    assert {event["stage"]: event["reason"] for event in told}.keys() == {"better", "after", "reads"}


def test_a_condition_that_cannot_be_judged_fails_its_stage_and_a_resume_judges_again(
    served: TestFleet, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    fail = {"type": "Boom", "message": "not yet", "retryable": False, "unless_exists": str(flag)}
    run = submit_pipeline(
        graph(
            node("first", output={"text": "x"}),
            conditional("skipped", {"value": "${first.output.text}", "equals": "y"}, output=1),
            node("breaks", "first", fail=fail, output=2),
            conditional("wrong", {"value": "${first.output.text}", "greater_than": 3}, output=3),
            conditional("absent", {"value": "${first.output.none}", "equals": 3}, output=4),
        ),
        app=served.app,
    )
    with pytest.raises(TaskFailed):
        run.wait(timeout=patient(60))
    errors = {stage["name"]: (stage["error"] or {}).get("type") for stage in run.status()["stages"]}
    assert (errors["wrong"], errors["absent"]) == ("ConditionError", "UnresolvedReference")
    flag.touch()

    assert run.resume() == "resumed"
    with pytest.raises(TaskFailed):
        run.wait(timeout=patient(60))

    assert (run["breaks"].result or {})["output"] == 2
    assert run["skipped"].state == "SKIPPED"
