"""The records of a pipeline's tasks live as long as the pipeline needs them, and a late word ends no later round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import submit, submit_pipeline
from gpuflow.errors import ResultGone
from gpuflow.pipelines.records import PipelineState
from gpuflow.upkeep.reconciler import Reconciler
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

#: Long enough to read what has just ended on a slow machine.
RETENTION_SECONDS = 8
SHORT = {"GPUFLOW_RETENTION_DAYS": str(RETENTION_SECONDS / 86_400)}


def template(**last: Any) -> dict[str, Any]:
    rows = {"type": "list", "items": [f"row {number}" for number in range(6)]}
    return {
        "apiVersion": "gpuflow/v1",
        "kind": "Pipeline",
        "metadata": {"name": "long"},
        "spec": {
            "taskType": "echo",
            "stages": [
                {"name": "first", "spec": {"data": rows, "parallel": {"enabled": True, "max_shards": 3}}},
                {"name": "middle", "spec": {"echo": {"output": 1, **last}}},
                {"name": "last", "spec": {"data": {"type": "list", "items": "${first.result.items}"}}},
            ],
        },
    }


def test_records_outlive_their_retention_while_their_pipeline_runs(fleet: TestFleet, tmp_path: Path) -> None:
    # Given a worker that forgets ended tasks after some seconds, and a pipeline that takes longer
    fleet.start_worker("w1", "--max-jobs", "2", env=SHORT)
    gate = tmp_path / "gate"
    run = submit_pipeline(template(until_exists=str(gate)), app=fleet.app)
    eventually(lambda: run["middle"].state == "DISPATCHED", what="the second stage")
    first = [task.id for task in run["first"].tasks]
    assert len(first) == 3

    # When a later task that is in no pipeline has been forgotten
    alone = submit(fleet.echo(output=1), app=fleet.app)
    eventually(lambda: fleet.app.ledger.find(alone.id) is None, what="an expired record")
    fleet.app.pipeline_controller.reconcile(run.id)

    # Then those of the pipeline are there, ran once, and the last stage gets all rows
    records = [fleet.app.ledger.get(task_id) for task_id in first]
    assert [record.attempt for record in records] == [1, 1, 1]
    gate.touch()
    assert run.wait(timeout=patient(30), check=False).state == "SUCCEEDED"
    assert [item["output"]["output"] for item in run["last"].result["items"]] == [f"row {n}" for n in range(6)]
    keys, client = fleet.app.keys, fleet.broker.client
    for task_id in first:
        assert client.ttl(keys.task(task_id)) >= 0


def test_a_resume_keeps_what_has_succeeded_and_lets_the_rest_expire(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1")
    gate = tmp_path / "gate"
    failing = {"fail": {"unless_exists": str(gate)}}
    run = submit_pipeline(template(**failing), app=fleet.app)
    assert run.wait(timeout=patient(30), check=False).state == "FAILED"
    keys, client = fleet.app.keys, fleet.broker.client
    first, middle = ([task.id for task in run[name].tasks] for name in ("first", "middle"))
    assert all(client.ttl(keys.task(task_id)) > 0 for task_id in first + middle)

    gate.touch()
    run.resume()

    assert [client.ttl(keys.task(task_id)) for task_id in first] == [-1] * 3
    assert [client.ttl(keys.events(task_id)) for task_id in first] == [-1] * 3
    assert all(client.ttl(keys.task(task_id)) > 0 for task_id in middle)
    assert run.wait(timeout=patient(30), check=False).state == "SUCCEEDED"
    assert all(client.ttl(keys.task(task_id)) > 0 for task_id in first)


def test_a_record_that_a_pipeline_names_no_more_is_let_go(fleet: TestFleet) -> None:
    fleet.start_worker("w1")
    run = submit_pipeline(template(), app=fleet.app)
    assert run.wait(timeout=patient(30), check=False).state == "SUCCEEDED"
    keys, client = fleet.app.keys, fleet.broker.client
    (one, *_) = (task.id for task in run["first"].tasks)
    client.persist(keys.task(one))
    client.zadd(keys.tasks, {one: 1})

    assert Reconciler(fleet.app).run()["record_let_go"] == 1
    assert client.ttl(keys.task(one)) > 0


def test_rows_that_are_gone_fail_the_stage_by_name(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1")
    gate = tmp_path / "gate"
    run = submit_pipeline(template(until_exists=str(gate)), app=fleet.app)
    eventually(lambda: run["middle"].state == "DISPATCHED", what="the second stage")
    (gone, *_) = (task.id for task in run["first"].tasks)
    fleet.broker.client.delete(fleet.app.keys.task(gone))
    gate.touch()

    assert run.wait(timeout=patient(30), check=False).state == "FAILED"
    assert "1 of its 3 tasks are gone" in run["last"].record.error["message"]
    with pytest.raises(ResultGone, match="'first'"):
        _ = run["first"].result


def test_a_reconcile_that_comes_late_ends_no_later_round(fleet: TestFleet, tmp_path: Path) -> None:
    # Given a pipeline that has failed, and a reconcile that has seen that and is held up
    fleet.start_worker("w1")
    gate = tmp_path / "gate"
    run = submit_pipeline(template(fail={"unless_exists": str(gate)}), app=fleet.app)
    assert run.wait(timeout=patient(30), check=False).state == "FAILED"
    gate.touch()

    # When it is resumed meanwhile, and the reconcile goes on
    run.resume()
    ended = fleet.app.pipelines.end(run.id, PipelineState.FAILED, ["first", "middle", "last"], epoch=1)

    # Then nothing comes of it
    assert not ended
    assert run.wait(timeout=patient(30), check=False).state == "SUCCEEDED"
