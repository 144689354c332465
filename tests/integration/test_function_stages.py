"""Stages of pipelines that call a team's functions: references, matrix, shards, and every end that a call can have."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from gpuflow import submit, submit_pipeline
from gpuflow.errors import TaskFailed
from gpuflow.explaining import explain
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

MODULE = "team_stages"


def call(name: str, *args: Any, rows: str = "", **kwargs: Any) -> dict[str, Any]:
    section: dict[str, Any] = {"name": f"{MODULE}.{name}", **({"rows": rows} if rows else {})}
    if args:
        section["args"] = list(args)
    if kwargs:
        section["kwargs"] = kwargs
    return {"taskType": "function", "function": section}


def run(fleet: TestFleet, *stages: dict[str, Any]) -> Any:
    template = {"apiVersion": "gpuflow/v1", "spec": {"stages": list(stages)}}
    return submit_pipeline(template, app=fleet.app)


def done(fleet: TestFleet, *stages: dict[str, Any]) -> Any:
    started = run(fleet, *stages)
    started.wait(timeout=patient(60))
    return started


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One broker for all tests of this file."""
    return long_fleet


@pytest.fixture(scope="module")
def worker(fleet: TestFleet) -> WorkerProcess:
    return fleet.start_worker("w1", "--include", MODULE)


def test_functions_and_other_stages_give_each_other_what_they_made(fleet: TestFleet, worker: WorkerProcess) -> None:
    ended = done(
        fleet,
        {"name": "cut", "spec": call("words", "a bb ccc dddd")},
        {"name": "say", "spec": fleet.echo(output="${cut.result.value[2]}")},
        {
            "name": "sweep",
            "matrix": {"function.kwargs.plus": [0, 100]},
            "spec": call("lengths", ["${say.result.output}", "four", "${say.result.output}!"], plus=0),
        },
        {
            "name": "split",
            "spec": {
                **call(
                    "lengths", texts="${cut.result.value}", plus="${sweep.result.results.value[1][0]}", rows="texts"
                ),
                "parallel": {"max_shards": 3},
            },
        },
        {"name": "all", "spec": call("given", "${split.result.items}", text="n=${sweep.result.results.value[0][1]}")},
    )

    assert ended["cut"].result["value"] == ["a", "bb", "ccc", "dddd"]
    assert [one["value"] for one in ended["sweep"].result["results"]] == [[3, 4, 4], [103, 104, 104]]
    assert ended["split"].result["items"] == [104, 105, 106, 107] and len(ended["split"].tasks) == 3
    assert ended["all"].result["value"] == {"args": "([104, 105, 106, 107],)", "kwargs": "{'text': 'n=4'}"}


def value_of(ended: Any, stage: str = "one") -> Any:
    return ended[stage].result["value"]


def one(spec: dict[str, Any]) -> dict[str, Any]:
    return {"name": "one", "spec": spec}


def failure_of(fleet: TestFleet, *stages: dict[str, Any]) -> str:
    started = run(fleet, *stages)
    with pytest.raises(TaskFailed) as failed:
        started.wait(timeout=patient(60))
    assert started.state == "FAILED"
    return str(failed.value)


def test_a_list_that_is_split_has_items_into_however_few_parts_it_comes(
    fleet: TestFleet, worker: WorkerProcess
) -> None:
    def split(texts: list[str]) -> Any:
        return done(fleet, one({**call("lengths", texts=texts, rows="texts"), "parallel": {"max_shards": 4}}))["one"]

    assert (split(["abc"]).result["items"], split([]).result["items"]) == ([3], [])
    assert len(split(["a", "b"]).tasks) == 2


def test_a_function_of_a_template_runs_in_a_child_whatever_it_says(fleet: TestFleet, worker: WorkerProcess) -> None:
    ended = done(fleet, one(call("place")))

    assert value_of(ended)["pid"] != worker.process.pid and value_of(ended)["gpus"] == ""
    record = ended["one"].tasks[0].record()
    assert (record.queue, record.task_type, record.stage, record.attempt) == ("cpu", "function", "one", 1)
    assert record.name == "pipeline/one" and record.pipeline == ended.id


def test_one_task_of_a_template_is_a_function_too(fleet: TestFleet, worker: WorkerProcess) -> None:
    template = {
        "apiVersion": "gpuflow/v1",
        "metadata": {"name": "cut", "owner": "ana", "labels": {"team": "nlp"}},
        "spec": {**call("words", "a b", times=2), "timeout": "50s", "priority": 7},
    }
    sent = submit(template, app=fleet.app)

    record = sent.wait(timeout=patient(30))
    assert record.result is not None and record.result["value"] == ["a", "b", "a", "b"]
    assert (record.name, record.owner, record.labels) == ("cut", "ana", {"team": "nlp"})
    again = submit(template["spec"], idempotency_key="the same", app=fleet.app)
    assert submit(template["spec"], idempotency_key="the same", app=fleet.app).id == again.id


def test_what_looks_like_more_than_data_arrives_as_data(fleet: TestFleet, worker: WorkerProcess) -> None:
    odd = {"__type__": "nobody's", "__value__": [1]}
    day = {"__type__": "date", "__value__": "2026-03-01"}
    deep = {"__type__": "datetime", "__value__": "no date"}
    spec = call("given", odd, "$${env:HOME} $${a.b}", [day], deep=deep, x=None)

    told = value_of(done(fleet, one(spec)))

    assert told["args"] == repr((odd, "${env:HOME} ${a.b}", [date(2026, 3, 1)]))
    assert told["kwargs"] == repr({"deep": deep, "x": None})
    assert value_of(done(fleet, one(call("same", odd)), {"name": "two", "spec": call("same", 1)})) == odd


def test_a_date_that_a_function_returns_is_one_for_the_next(fleet: TestFleet, worker: WorkerProcess) -> None:
    day = {"__type__": "date", "__value__": "2026-03-01"}
    ended = done(
        fleet,
        {"name": "one", "spec": call("following", day)},
        {"name": "two", "spec": call("following", "${one.result.value}")},
    )

    assert value_of(ended, "two") == {"__type__": "date", "__value__": "2026-03-03"}


def test_an_artifact_of_a_function_is_passed_on(fleet: TestFleet, worker: WorkerProcess) -> None:
    ended = done(
        fleet,
        {"name": "one", "spec": call("weights")},
        {"name": "two", "spec": call("size_of", "${one.result.value}")},
    )

    assert value_of(ended, "two") == 10 and set(value_of(ended)) == {"$artifact"}


def test_what_several_tasks_leave_in_the_store_is_loaded(fleet: TestFleet, worker: WorkerProcess) -> None:
    size = 1_200_000
    many = {"name": "many", "matrix": {"echo.output": ["a" * size, "b" * (size + 1), "c"]}, "spec": fleet.echo()}
    args = ["${many.result.results.output}", "${many.result.results}", "${many.result}"]
    stages = [{"name": f"f{number}", "spec": call("shape", arg)} for number, arg in enumerate(args)]
    ended = done(fleet, many, *stages)

    stored = ended["many"].tasks[0].record().result
    assert set(stored["output"]) == {"$artifact"}
    sizes = [size, size + 1, 1]
    assert value_of(ended, "f0") == sizes
    assert [one["output"] for one in value_of(ended, "f1")] == sizes
    assert [one["output"] for one in value_of(ended, "f2")["results"]] == sizes


def test_a_file_that_is_no_json_is_judged_and_named_as_it_is(fleet: TestFleet, worker: WorkerProcess) -> None:
    there = {"value": "${one.result.value}", "exists": True}
    other = {"value": "${one.result.value}", "equals": "x"}
    nodes = [
        one(call("weights")),
        {"name": "two", "dependsOn": ["one"], "condition": there, "spec": call("size_of", "${one.result.value}")},
        {"name": "not", "dependsOn": ["one"], "condition": other, "spec": call("same", 1)},
        {"name": "say", "dependsOn": ["one"], "spec": fleet.echo(message="made ${one.result.value}")},
    ]
    started = submit_pipeline({"apiVersion": "gpuflow/v1", "spec": {"graph": {"nodes": nodes}}}, app=fleet.app)
    started.wait(timeout=patient(60))

    assert value_of(started, "two") == 10 and started["not"].state == "SKIPPED"
    assert "weights.bin" in started["say"].result["message"]


def test_a_failing_function_fails_the_pipeline_with_its_cause(fleet: TestFleet, worker: WorkerProcess) -> None:
    after = {"name": "after", "spec": call("words", "${one.result.value}")}

    assert "not the right one" in failure_of(fleet, one(call("fails", "not the right one")), after)
    assert "unexpected keyword argument" in failure_of(fleet, one(call("words", "a", none="such")), after)


def test_the_others_of_a_stage_end_with_the_first_that_fails(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    begun, no_file = str(tmp_path / "begun"), str(tmp_path)
    spec = {**call("waits", begun, str(tmp_path / "never")), "resources": {"hardware": {"cpu": 0.1}}}
    started = run(fleet, {"name": "one", "matrix": {"function.args[0]": [begun, no_file]}, "spec": spec})

    with pytest.raises(TaskFailed, match="Is a directory"):
        started.wait(timeout=patient(60))

    eventually(lambda: [fleet.state(task.id) for task in started["one"].tasks] == ["CANCELLED", "FAILED"], what="ends")


def test_a_condition_is_over_what_a_function_returns(fleet: TestFleet, worker: WorkerProcess) -> None:
    def after(length: int) -> dict[str, Any]:
        condition = {"value": "${one.result.value[0]}", "equals": length}
        return {"name": f"when-{length}", "dependsOn": ["one"], "condition": condition, "spec": call("same", length)}

    template = {"spec": {"graph": {"nodes": [one(call("lengths", ["abc"])), after(3), after(4)]}}}
    started = submit_pipeline({"apiVersion": "gpuflow/v1", **template}, app=fleet.app)
    started.wait(timeout=patient(60))

    assert (started["when-3"].state, started["when-4"].state) == ("SUCCEEDED", "SKIPPED")


def test_what_nests_too_deeply_for_a_template_fails_the_stage(fleet: TestFleet, worker: WorkerProcess) -> None:
    deep = {"name": "two", "spec": call("same", "${one.result.value}")}

    assert "nest" in failure_of(fleet, one(call("nested", 300)), deep)
    assert "stage 'two' failed: stage 'two': a value that it refers to" in failure_of(
        fleet, one(call("nested", 900)), deep
    )


def test_a_retry_goes_on_within_its_stage(fleet: TestFleet, worker: WorkerProcess) -> None:
    ended = done(fleet, one(call("third_try", factor=1)), {"name": "two", "spec": call("given", "${one.result.value}")})

    assert value_of(ended) == [2, 100] and value_of(ended, "two")["args"] == "([2, 100],)"
    record = ended["one"].tasks[0].record()
    assert (record.attempt, record.queue) == (3, "cpu")


def test_a_stage_is_replaced_by_one_function_alone(fleet: TestFleet, worker: WorkerProcess) -> None:
    two = {"name": "two", "spec": call("given", "${one.result.value}")}
    ended = done(fleet, one(call("replaces", "by a function")), two)

    assert value_of(ended) == [11, 12] and value_of(ended, "two")["args"] == "([11, 12],)"
    for how, what in (("by a chain", "a chain"), ("by Celery's", "celery.map")):
        assert what in failure_of(fleet, one(call("replaces", how)), two)


def test_words_to_celery_end_the_stage(fleet: TestFleet, worker: WorkerProcess) -> None:
    two = {"name": "two", "spec": call("given", "${one.result.value}")}

    assert value_of(done(fleet, one(call("ends", "ignore")), two), "two")["args"] == "(None,)"
    assert "not by me" in failure_of(fleet, one(call("ends", "reject")), two)
    assert "use self.retry()" in failure_of(fleet, one(call("ends", "retry")), two)


def test_a_limit_of_the_template_ends_it(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    spec = call("waits", str(tmp_path / "begun"), str(tmp_path / "never"))

    assert "time limit" in failure_of(fleet, one({**spec, "timeout": 1}))


def test_a_cancelled_pipeline_ends_its_function(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    started = run(fleet, one(call("waits", str(begun), str(tmp_path / "never"))))
    eventually(begun.exists, what="a function that runs")

    started.cancel()

    eventually(lambda: fleet.state(started["one"].tasks[0].id) == "CANCELLED", what="its end")
    assert started.state == "CANCELLED"


def test_a_warm_function_is_warm_in_a_stage(fleet: TestFleet, worker: WorkerProcess) -> None:
    many = {"name": "many", "matrix": {"function.args[0]": [1, 2, 3]}, "spec": call("warm", 0)}
    ended = done(fleet, one(call("warm", 0)), many)

    answers = [task["value"] for task in ended["many"].result["results"]]
    assert [answer["number"] for answer in answers] == [1, 2, 3]
    assert value_of(ended)["pid"] in {answer["pid"] for answer in answers}


def test_batches_methods_and_models_as_arguments(fleet: TestFleet, worker: WorkerProcess) -> None:
    def sweep(name: str, values: list[Any]) -> list[Any]:
        ended = done(fleet, {"name": "one", "matrix": {"function.args[0]": values}, "spec": call(name, 0)})
        return [task["value"] for task in ended["one"].result["results"]]

    assert sweep("together", [1, 2, 3]) == [{"double": 2}, {"double": 4}, {"double": 6}]
    products = sweep("Model.times", [1, 2])
    assert [product for product, _ in products] == [3, 6] and len({pid for _, pid in products}) == 1
    assert value_of(done(fleet, one(call("search", {"text": "a"})))) == {"text": "a", "top_k": 5}
    assert "ask.top_k" in failure_of(fleet, one(call("search", {"text": "a", "top_k": "many"})))
    assert value_of(done(fleet, one(call("merged", 7))))[0] != worker.process.pid


def test_the_tasks_of_a_stage_run_at_once_where_they_say_their_cpus(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    spec = {**call("waits", str(begun), str(until)), "resources": {"hardware": {"cpu": 0.1}}}
    started = run(fleet, {"name": "one", "matrix": {"function.args[0]": [str(begun)] * 4}, "spec": spec})

    eventually(lambda: begun.exists() and len(set(begun.read_text().splitlines())) == 4, what="four calls at once")
    until.touch()
    started.wait(timeout=patient(60))


def test_a_stage_with_a_word_on_memory_alone_lacks_gpus_too(fleet: TestFleet, worker: WorkerProcess) -> None:
    spec = {**call("on_gpu"), "resources": {"hardware": {"memory": "1Mi"}}}

    assert "of which the template that calls it says nothing" in failure_of(fleet, one(spec))


def test_a_function_with_gpus_says_that_the_stage_lacks_resources(fleet: TestFleet, worker: WorkerProcess) -> None:
    told = failure_of(fleet, one(call("on_gpu")))

    assert "A100:1" in told and "give `resources`" in told


def test_a_function_that_no_worker_has_waits_and_explain_says_so(fleet: TestFleet, worker: WorkerProcess) -> None:
    spec = {"taskType": "function", "function": "of_others.jobs.embed"}

    (before,) = explain({"apiVersion": "gpuflow/v1", "spec": spec}, app=fleet.app)
    assert "function of_others.jobs.embed" in "\n".join(before.to_lines())
    started = run(fleet, one(spec))
    task = eventually(lambda: started["one"].tasks, what="a task that waits")[0]
    (waits,) = explain(task.id, app=fleet.app)
    told = "\n".join(waits.to_lines())
    assert "no module that it was started with (--include) registers it" in told
    assert "start one with --include and its module" in told
    assert started.cancel()
