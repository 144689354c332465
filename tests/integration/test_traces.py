"""Traces of tasks and pipelines: real workers, the real exporter, and a collector on loopback that is read."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from gpuflow.client import submit, submit_pipeline
from gpuflow.errors import TaskFailed
from tests.fixtures.fleets import OPTIONS
from tests.integration.test_pipelines import graph, node
from tests.support.collector import Collector, SeenSpan
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient

CANARY = "canary-6f1b2c9d40aa"
#: Parts of an attempt that ran to its end.
PARTS = ["prepare", "run", "commit"]


def variables(endpoint: str) -> dict[str, str]:
    return {
        "GPUFLOW_TRACES": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-collector-token={CANARY}-header",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_SERVICE_NAME": "a-fleet",
        "NO_PROXY": "127.0.0.1",
        "GPUFLOW_LEASE_SEC": "3",
        "GPUFLOW_SECRET_CANARY": f"{CANARY}-secret",
        "GPUFLOW_PASS_ENV": "OTEL_EXPORTER_OTLP_HEADERS",
    }


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[TestFleet]:
    """A fleet whose worker and client send spans to the collector."""
    env = variables(collector.url)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        made = TestFleet(tmp_path_factory.mktemp("traced"), env=env, options=OPTIONS)
        try:
            made.start_worker("w1", "--max-jobs", "2", "--include", "team_stages")
            yield made
        finally:
            if made.app.traces is not None:
                made.app.traces.close()
            made.close()


def with_all(collector: Collector, record_id: str, *last: str) -> list[SeenSpan]:
    """Return the spans of a task or pipeline as soon as those are there that different processes send last."""

    def found() -> list[SeenSpan] | None:
        spans = collector.of(record_id)
        return spans if set(last) <= {span.name for span in spans} else None

    return eventually(found, what=f"the spans {', '.join(last)}") or []


def one(spans: list[SeenSpan], name: str, attempt: int = 0) -> SeenSpan:
    found = [span for span in spans if span.name == name and (not attempt or span.attempt == attempt)]
    assert len(found) == 1, f"{name!r} is there {len(found)} times: {[span.name for span in spans]}"
    return found[0]


def below(spans: list[SeenSpan], parent: SeenSpan) -> list[str]:
    return [span.name for span in spans if span.parent == parent.id]


def test_a_task_is_one_tree_from_submit_to_commit(traced: TestFleet, collector: Collector) -> None:
    task = submit(traced.echo(output=1, sleep_seconds=0.2), owner="ana", app=traced.app)
    task.get(timeout=patient(30))
    spans = with_all(collector, task.id, "submit echo", "task echo")

    assert len({span.trace for span in spans}) == 1 and {span.service for span in spans} == {"a-fleet"}
    root, whole = one(spans, "submit echo"), one(spans, "task echo")
    assert not root.parent and whole.parent == root.id
    assert below(spans, whole) == ["queue", "attempt echo"]
    attempt = one(spans, "attempt echo")
    assert below(spans, attempt) == PARTS
    assert (
        attempt.attributes
        | {
            "gpuflow.task.id": task.id,
            "gpuflow.task.type": "echo",
            "gpuflow.owner": "ana",
            "gpuflow.worker": "w1",
            "gpuflow.attempt": 1,
            "gpuflow.outcome": "succeeded",
            "gpuflow.queue": task.record().queue,
        }
        == attempt.attributes
    )
    assert whole.attributes["gpuflow.state"] == "SUCCEEDED"
    assert [span.name for span in spans if span.failed] == []
    run = one(spans, "run")
    assert run.end - run.start >= 0.2 and attempt.start <= run.start <= run.end <= attempt.end <= whole.end


def test_a_pipeline_is_one_tree(traced: TestFleet, collector: Collector) -> None:
    run = submit_pipeline(graph(node("a", output=1), node("b", "a", output=2)), app=traced.app)
    run.wait(timeout=patient(60))
    spans = with_all(collector, run.id, "submit pipeline", "pipeline")

    assert len({span.trace for span in spans}) == 1
    root, pipeline = one(spans, "submit pipeline"), one(spans, "pipeline")
    assert not root.parent and pipeline.parent == root.id and pipeline.attributes["gpuflow.state"] == "SUCCEEDED"
    tasks = [span for span in spans if span.parent == pipeline.id]
    assert [(task.name, task.attributes["gpuflow.stage"]) for task in tasks] == [("task echo", "a"), ("task echo", "b")]
    for task in tasks:
        assert below(spans, task) == ["queue", "attempt echo"]
    assert pipeline.start <= tasks[0].start and tasks[0].end <= tasks[1].start and tasks[1].end <= pipeline.end


def test_functions_of_templates_are_in_the_tree(traced: TestFleet, collector: Collector) -> None:
    spec = {"taskType": "function", "function": {"name": "team_stages.words", "args": ["a b"]}}
    run, task = submit_pipeline(graph({"name": "a", "spec": spec}), app=traced.app), submit(spec, app=traced.app)
    run.wait(timeout=patient(60))
    task.get(timeout=patient(30))

    spans = with_all(collector, run.id, "submit pipeline", "pipeline")
    (of_stage,) = [span for span in spans if span.parent == one(spans, "pipeline").id]
    assert (of_stage.name, of_stage.attributes["gpuflow.stage"]) == ("task function", "a")
    assert below(spans, of_stage) == ["queue", "attempt function"]
    alone = with_all(collector, task.id, "submit function", "task function")
    assert one(alone, "task function").parent == one(alone, "submit function").id


def test_the_span_of_the_caller_is_the_parent(traced: TestFleet, collector: Collector) -> None:
    with TracerProvider().get_tracer("a-service").start_as_current_span("handle-request") as caller:
        task = submit(traced.echo(output=1), app=traced.app)
    task.get(timeout=patient(30))
    context = caller.get_span_context()

    spans = with_all(collector, task.id, "submit echo", "task echo")

    assert {span.trace for span in spans} == {f"{context.trace_id:032x}"}
    assert one(spans, "submit echo").parent == f"{context.span_id:016x}"


def test_a_request_to_the_gateway_continues_its_trace(traced: TestFleet, collector: Collector, tmp_path: Path) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    env = {**traced.env, "REDIS_URL": traced.broker.url, "OTEL_SERVICE_NAME": "the-gateway"}
    with Gateway(tmp_path, env=env) as gateway:
        answer = httpx.post(
            f"{gateway.url}/api/v1/tasks",
            json=traced.echo(output=1),
            headers={**gateway.headers, "traceparent": parent},
            timeout=patient(30),
        )
        assert answer.status_code == 201, answer.text
        spans = with_all(collector, answer.json()["id"], "submit echo", "task echo")

    submitted = one(spans, "submit echo")
    assert (submitted.trace, submitted.parent) == tuple(parent.split("-")[1:3])
    assert submitted.service == "the-gateway" and {span.trace for span in spans} == {submitted.trace}


def test_a_child_knows_its_span_and_no_token_of_the_collector(traced: TestFleet, collector: Collector) -> None:
    names = ["TRACEPARENT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_ENDPOINT"]
    task = submit(traced.echo(output=1, report_env=names), app=traced.app)
    seen = task.get(timeout=patient(30))["environment"]
    spans = with_all(collector, task.id, "submit echo", "task echo")

    attempt = one(spans, "attempt echo")
    assert seen["TRACEPARENT"] == f"00-{attempt.trace}-{attempt.id}-01"
    assert not seen.get("OTEL_EXPORTER_OTLP_HEADERS") and not seen.get("OTEL_EXPORTER_OTLP_ENDPOINT")


def test_a_failed_task_is_red_and_no_secret_is_in_any_span(traced: TestFleet, collector: Collector) -> None:
    failing = traced.echo(fail={"type": "Boom", "message": f"it read {CANARY}", "retryable": False})
    task = submit({**failing, "secrets": ["CANARY"], "env": {"TEXT": CANARY}}, app=traced.app)
    with pytest.raises(TaskFailed):
        task.get(timeout=patient(30))
    spans = with_all(collector, task.id, "submit echo", "task echo")

    assert {span.name for span in spans if span.failed} == {"attempt echo", "task echo"}
    assert one(spans, "task echo").attributes["error.type"] == "Boom"
    assert one(spans, "task echo").attributes["gpuflow.state"] == "FAILED"
    assert all(CANARY.encode() not in body for body in collector.bodies)
    assert {headers.get("X-Collector-Token", headers.get("x-collector-token")) for headers in collector.headers} == {
        f"{CANARY}-header"
    }


def test_merged_calls_are_linked_to_their_run(traced: TestFleet, collector: Collector, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    spec = {**traced.echo(output=1, until_exists=str(gate)), "merge": "always"}
    first, second = (submit(spec, app=traced.app) for _ in range(2))
    gate.touch()
    for task in (first, second):
        task.get(timeout=patient(30))
    run_id = first.record().run
    assert run_id and second.record().run == run_id

    run = one(with_all(collector, run_id, "task echo"), "task echo")
    ends = [one(with_all(collector, task.id, "task echo"), "task echo") for task in (first, second)]

    assert [span.links for span in ends] == [(run.id,)] * 2
    assert run.parent == next(span.id for span in ends if span.task == first.id)


def test_the_attempt_of_a_killed_worker_is_told_by_the_next_one(
    traced: TestFleet, collector: Collector, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    traced.workers[0].stop()
    first = traced.start_worker("w2")
    task = submit(traced.echo(output=1, until_exists=str(gate)), app=traced.app)
    eventually(lambda: task.state == "RUNNING", what="a running attempt")
    first.send(signal.SIGKILL)
    first.process.wait()
    gate.touch()

    traced.start_worker("w3")
    task.get(timeout=patient(60))
    spans = with_all(collector, task.id, "task echo")

    lost, again = one(spans, "attempt echo", 1), one(spans, "attempt echo", 2)
    assert lost.failed and lost.events == ("worker_lost",) and lost.attributes["error.type"] == "WorkerLost"
    assert (lost.attributes["gpuflow.worker"], again.attributes["gpuflow.worker"]) == ("w2", "w3")
    assert not again.failed and below(spans, again) == PARTS
    whole = one(spans, "task echo")
    assert lost.parent == again.parent == whole.id and lost.end <= again.start + 0.001
    assert whole.attributes["gpuflow.attempt"] == 2 and not whole.failed


def test_a_preempted_attempt_and_one_without_memory_say_so(
    traced: TestFleet, collector: Collector, tmp_path: Path
) -> None:
    for other in traced.workers:
        other.stop()
    worker, gate = traced.start_worker("w4"), tmp_path / "go"
    fail = {"type": "OutOfMemory", "message": "too large", "retryable": True, "attempts": 1}
    spec = {**traced.echo(output=1, fail=fail), "retry": {"backoff_seconds": 0}}
    without_memory = submit(spec, app=traced.app)
    without_memory.get(timeout=patient(60))
    task = submit(traced.echo(output=1, until_exists=str(gate)), app=traced.app)
    eventually(lambda: task.state == "RUNNING", what="a running attempt")

    worker.send(signal.SIGTERM)
    eventually(lambda: traced.registry.find("w4").state == "DRAINING", what="the drain")  # type: ignore[union-attr]
    worker.send(signal.SIGTERM)
    assert worker.process.wait(timeout=patient(60)) == 0
    gate.touch()
    traced.start_worker("w5")
    task.get(timeout=patient(60))

    spans = with_all(collector, task.id, "task echo")
    first, second = one(spans, "attempt echo", 1), one(spans, "attempt echo", 2)
    assert first.events == ("preempted",) and first.attributes["gpuflow.outcome"] == "preempted" and not first.failed
    assert [span.name for span in spans if span.name == "queue"] == ["queue"] * 2
    assert second.attributes["gpuflow.worker"] == "w5" and not one(spans, "task echo").failed
    spans = with_all(collector, without_memory.id, "task echo")
    failed = one(spans, "attempt echo", 1)
    assert failed.failed and failed.events == ("oom_retry",) and failed.attributes["error.type"] == "OutOfMemory"


def test_a_cancelled_task_ends_its_trace(traced: TestFleet, collector: Collector) -> None:
    spec = {**traced.echo(output=1), "resources": {"labels": {"nowhere": "1"}}}
    task = submit(spec, app=traced.app)

    traced.app.cancel_task(task.id)

    spans = with_all(collector, task.id, "submit echo", "task echo")
    assert sorted(span.name for span in spans) == ["submit echo", "task echo"]
    assert one(spans, "task echo").attributes["gpuflow.state"] == "CANCELLED"
    assert not one(spans, "task echo").failed


@pytest.mark.parametrize("mode", ["refuse", "hang", "down"])
def test_a_broken_collector_harms_no_task(mode: str, tmp_path: Path) -> None:
    collector = Collector()
    env = {**variables(collector.url), "OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}
    collector.mode = mode
    if mode == "down":
        collector.close()
    fleet = TestFleet(tmp_path, env=env, options=OPTIONS)
    try:
        worker = fleet.start_worker("w1")
        tasks = [submit({**fleet.echo(output=n), "merge": "never"}, app=fleet.app) for n in range(6)]
        assert [task.get(timeout=patient(60))["output"] for task in tasks] == list(range(6))
        if mode != "down":
            eventually(lambda: collector.requests, what="a request to the collector")
        if mode != "hang":
            eventually(lambda: "traces_not_exported" in worker.log(), what="the line of the log")
        assert worker.stop() == 0
        log = worker.log()
        assert log.count("traces_not_exported") <= 1
        assert "opentelemetry" not in log and "Traceback" not in log
    finally:
        if mode != "down":
            collector.close()
        if fleet.app.traces is not None:
            fleet.app.traces.close()
        fleet.close()


def test_without_the_setting_nothing_of_opentelemetry_is_loaded(served: TestFleet) -> None:
    assert served.app.traces is None
    task = submit({**served.echo(output=1), "merge": "never"}, app=served.app)
    task.get(timeout=patient(30))
    raw = served.broker.client.hgetall(served.app.keys.task(task.id))
    assert "traceparent" not in raw and "traceparent" not in json.loads(raw["message"])["headers"]
