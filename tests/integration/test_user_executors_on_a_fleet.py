"""A user's executor on the fleet: submitted, routed to a worker that has it, run in a child, committed."""

from __future__ import annotations

import json

import pytest

from gpuflow.client import submit, submit_pipeline
from gpuflow.errors import TaskFailed
from gpuflow.explaining import explain
from tests.fixtures.executor_child import ROOT
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

EXAMPLE = ROOT / "examples" / "executor" / "acme_wordcount" / "executor.py"
HERE = {"GPUFLOW_EXECUTORS": f"acme.wordcount={EXAMPLE}:WordCount"}


def wordcount(*texts: object, **parameters: object) -> dict[str, object]:
    return {
        "taskType": "acme.wordcount",
        "data": {"type": "list", "items": list(texts)},
        "parameters": parameters,
        "resources": {"hardware": {"gpu": {"count": 0}}},
    }


def test_it_runs_where_it_is_registered_and_waits_elsewhere(fleet: TestFleet) -> None:
    without = fleet.start_worker("without")
    task = submit(wordcount("a b a", top=1), app=fleet.app)
    other = submit(fleet.echo(output=1), app=fleet.app)

    assert other.get(timeout=patient(30))["output"] == 1  # the worker looks past what it cannot run
    assert task.state == "QUEUED"
    assert "has no executor acme.wordcount" in repr(explain(task.id, app=fleet.app))
    fleet.start_worker("with", "--executors", "acme.wordcount", env=HERE)

    result = task.get(timeout=patient(30))

    assert result["items"][0]["output"] == {"a": 2}
    record = task.record()
    assert (record.worker, record.task_type, record.attempt) == ("with", "acme.wordcount", 1)
    assert json.loads((fleet.results / task.id / "responses.json").read_text())["items"] == result["items"]
    steps = [event.data["current"] for event in fleet.app.event_log.read(task.id) if event.name == "progress"]
    assert steps == [1]
    celery_result = fleet.app.AsyncResult(task.id)
    assert eventually(lambda: celery_result.state == "SUCCESS")
    assert without.process.poll() is None


def test_its_failure_is_the_tasks(fleet: TestFleet) -> None:
    fleet.start_worker("w1", env=HERE)
    task = submit(wordcount("a", top=0), app=fleet.app)

    with pytest.raises(TaskFailed, match=r"parameters\.top is 0"):
        task.get(timeout=patient(30))

    assert task.record().error == {
        "type": "BadInput",
        "message": "parameters.top is 0; give a count from 1 up",
        "retryable": False,
    }


def test_stages_of_a_pipeline_feed_it(fleet: TestFleet) -> None:
    fleet.start_worker("w1", env=HERE)
    count = {**wordcount(), "data": {"type": "list", "items": ["${say.result.text}"]}}
    run = submit_pipeline(
        {
            "apiVersion": "gpuflow/v1",
            "kind": "Pipeline",
            "metadata": {"name": "words"},
            "spec": {
                "stages": [
                    {"name": "say", "spec": {"taskType": "echo", "echo": {"output": {"text": "to be or not to be"}}}},
                    {"name": "count", "spec": count},
                ]
            },
        },
        app=fleet.app,
    )

    run.wait(timeout=patient(60))

    assert run["count"].result["items"][0]["output"] == {"to": 2, "be": 2, "or": 1}


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        (("--executors", "acme.wordcount"), {}, "'acme.wordcount' is no task type"),
        ((), {"GPUFLOW_EXECUTORS": "echo=module:Class"}, "names without a dot are gpuflow's own"),
    ],
    ids=["not registered", "a name of ours"],
)
def test_a_worker_says_what_is_wrong_and_does_not_start(
    fleet: TestFleet, options: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    worker = fleet.spawn_worker("w1", *options, env=env)

    assert worker.process.wait(timeout=patient(60)) != 0
    assert said in worker.log()
