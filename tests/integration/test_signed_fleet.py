"""Workers that run signed work alone run all that a holder of the key submits, as ever: nothing of it is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group

from gpuflow.client import submit, submit_pipeline
from gpuflow.errors import GPUFlowError
from gpuflow.schedules.celery_schedule import Scheduler
from gpuflow.schedules.duty import Schedules
from gpuflow.schedules.store import Schedule, ScheduleStore
from gpuflow.serving.models import ServedModel
from gpuflow.serving.store import ServedModels
from gpuflow.spec import parse
from tests.fixtures.fleets import OPTIONS
from tests.support.engines import SCRIPTED, build
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.signing import dead, key_file, signing_env
from tests.support.waiting import eventually, patient

SECONDS = 60
ECHO = "gpuflow.echo"
NO = {"type": "Boom", "message": "no luck", "retryable": True}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    folder = tmp_path_factory.mktemp("signed")
    build(folder / "envs", SCRIPTED, variant="cpu")
    env = {
        **signing_env(key_file(folder)),
        "GPUFLOW_ENV_DIR": str(folder / "envs"),
        "GPUFLOW_LEASE_SEC": "3",
        "HEARTBEAT_INTERVAL_SEC": "1",
    }
    made = TestFleet(folder, env, options=OPTIONS)
    try:
        yield made
        assert dead(made) == []  # nothing of what these tests have submitted was refused
    finally:
        made.close()


@pytest.fixture(scope="module")
def worker(fleet: TestFleet) -> WorkerProcess:
    return fleet.start_worker("w1", "--include", "plain_tasks", "--max-jobs", "4")


def plain(fleet: TestFleet, name: str, *args: Any, **options: Any) -> Any:
    return fleet.app.signature(f"plain_tasks.{name}", args=args, **options)


def echo(fleet: TestFleet, output: Any) -> Any:
    return fleet.app.signature(ECHO, kwargs={"spec": fleet.echo(output=output)})


def test_canvas_of_plain_and_supervised_tasks(fleet: TestFleet, worker: WorkerProcess) -> None:
    added = chain(plain(fleet, "add", 1, 2), plain(fleet, "add", 10), plain(fleet, "add", 100), app=fleet.app)
    together = group([plain(fleet, "add", number, 1) for number in range(4)], app=fleet.app)
    body = plain(fleet, "outputs")
    counted = chord([echo(fleet, number) for number in range(3)], body, app=fleet.app)
    linked = chain(echo(fleet, "x"), plain(fleet, "outputs_of_one"), app=fleet.app)
    results = [one.apply_async() for one in (added, together, counted, linked)]
    assert [result.get(timeout=patient(SECONDS)) for result in results] == [113, [1, 2, 3, 4], [0, 1, 2], "x"]


def test_retry_countdown_eta_redelivery_and_links(fleet: TestFleet, worker: WorkerProcess) -> None:
    eta = datetime.now(UTC) + timedelta(seconds=0.3)
    sent = [
        (plain(fleet, "retried", 4).apply_async(), 4),
        (plain(fleet, "add", 1, 1).apply_async(countdown=0.2), 2),
        (plain(fleet, "add", 2, 2).apply_async(eta=eta), 4),
        (plain(fleet, "reject_first").apply_async(), True),
        (plain(fleet, "add", 1, 2).apply_async(link=plain(fleet, "add", 10)), 3),
    ]
    assert [result.get(timeout=patient(SECONDS)) for result, _ in sent] == [wanted for _, wanted in sent]
    (child,) = sent[-1][0].children
    assert child.get(timeout=patient(SECONDS)) == 13


def test_merged_calls_batches_retries_and_results_that_are_used_again(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    specs = [{**fleet.echo(output=number % 3, until_exists=str(gate)), "merge": "always"} for number in range(9)]
    tasks = [submit({**spec, "resultTtlSeconds": 60}, app=fleet.app) for spec in specs]
    body = plain(fleet, "outputs")
    headers = [fleet.app.signature(ECHO, kwargs={"spec": spec}) for spec in specs[:3]]
    counted = chord(headers, body, app=fleet.app).apply_async()
    gate.touch()
    assert [task.get(timeout=patient(SECONDS))["output"] for task in tasks] == [number % 3 for number in range(9)]
    assert counted.get(timeout=patient(SECONDS)) == [0, 1, 2]
    again = submit({**specs[1], "resultTtlSeconds": 60}, app=fleet.app)  # fetches what is there
    assert again.get(timeout=patient(SECONDS))["output"] == 1
    failing = {**fleet.echo(fail=NO, output=1), "merge": "always", "retry": {"max_attempts": 2, "backoff_seconds": 0}}
    callers = [submit(failing, app=fleet.app) for _ in range(2)]
    assert {caller.wait(timeout=patient(SECONDS)).state for caller in callers} <= {"FAILED", "DEAD"}
    assert plain(fleet, "merged_retry", 7).apply_async().get(timeout=patient(SECONDS)) == 3


def test_pipelines_with_matrix_shards_references_failure_and_resume(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    rows = [{"row": number} for number in range(6)]
    go = tmp_path / "go"
    stages = [
        {"name": "many", "spec": fleet.echo(output=0), "matrix": {"echo.output": [1, 2]}},
        {
            "name": "split",
            "spec": {"taskType": "echo", "data": {"type": "list", "items": rows}, "parallel": {"max_shards": 2}},
        },
        {"name": "check", "spec": {"taskType": "command", "command": f"test -e {go}"}, "dependsOn": ["many", "split"]},
        {"name": "last", "spec": fleet.echo(output="${many.results[1].output}"), "dependsOn": ["check"]},
    ]
    run = submit_pipeline({"graph": {"nodes": stages}}, app=fleet.app)
    eventually(lambda: run.record().state.final, within=SECONDS, what="the failure")
    assert (str(run.record().state), str(run.record().stage("split").state)) == ("FAILED", "SUCCEEDED")
    go.touch()
    assert run.resume() == "resumed"
    eventually(lambda: str(run.record().state) == "SUCCEEDED", within=SECONDS, what="the end of the pipeline")


def test_warm_sessions_answer(fleet: TestFleet, worker: WorkerProcess) -> None:
    ask = {
        "taskType": "inference",
        "model": {"source": {"type": "local", "identifier": "/models/one"}},
        "data": {"type": "list", "items": ["a"]},
        "resources": {"hardware": {"gpu": {"count": 0}}},
        "merge": "never",
    }
    tasks = [submit(ask, app=fleet.app) for _ in range(3)]
    assert [task.wait(timeout=patient(SECONDS)).state for task in tasks] == ["SUCCEEDED"] * 3
    assert worker.log().count("event=session_opened") == 1


def test_a_task_whose_worker_is_killed_runs_again_and_one_that_failed_is_retried_by_hand(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    go, there = tmp_path / "go", tmp_path / "there"
    other = fleet.start_worker("w2", "--label", "second=", "--include", "plain_tasks")
    labelled = {"resources": {"labels": {"second": ""}}}
    task = submit({**fleet.echo(output=1, until_exists=str(go)), **labelled}, app=fleet.app)
    eventually(lambda: fleet.state(task.id) == "RUNNING", what="the task at work")
    other.process.kill()
    fleet.start_worker("w3", "--label", "second=", "--include", "plain_tasks")
    eventually(lambda: (record := task.record()).attempt == 2 and record.state == "RUNNING", within=SECONDS)
    go.touch()
    assert task.get(timeout=patient(SECONDS))["output"] == 1
    failing = submit({"taskType": "command", "command": f"test -e {there}"}, app=fleet.app)
    assert failing.wait(timeout=patient(SECONDS)).state == "FAILED"
    there.touch()
    assert failing.retry()
    eventually(lambda: fleet.state(failing.id) == "SUCCEEDED", within=SECONDS, what="the second life")
    cancelled = submit({**fleet.echo(output=2), "resources": {"labels": {"nobody": ""}}}, app=fleet.app)
    cancelled.cancel()
    assert fleet.app.ledger.retry_task(cancelled.id) and fleet.state(cancelled.id) == "QUEUED"
    cancelled.cancel()


def test_schedules_are_submitted_if_they_are_signed(fleet: TestFleet, worker: WorkerProcess) -> None:
    store = ScheduleStore(fleet.app.redis, fleet.app.keys, fleet.app.signer)
    template = parse(fleet.echo(output=1)).to_dict()
    midnight = datetime(2026, 3, 1, tzinfo=UTC).timestamp()
    made = Schedule(name="nightly", cron="0 3 * * *", created_at=midnight, template=template)
    store.put(made)
    beat = Schedules(fleet.app, lambda: midnight + 4 * 3600)
    (run,) = beat.look()
    eventually(lambda: str(fleet.app.pipelines.get(run).state) == "SUCCEEDED", within=SECONDS, what="the pipeline")
    templates, evil = fleet.app.keys.schedule_templates, parse(fleet.echo(output="evil")).to_dict()
    fleet.app.redis.hset(templates, "nightly", json.dumps(evil))
    assert Schedules(fleet.app, lambda: midnight + 30 * 3600).look() == []
    assert "does not fit" in store.runs()["nightly"].error
    ScheduleStore(fleet.app.redis, fleet.app.keys).put(made, replace=True)
    assert Schedules(fleet.app, lambda: midnight + 54 * 3600).look() == []
    assert "is not signed" in store.runs()["nightly"].error


def test_a_served_model_counts_if_it_is_signed(fleet: TestFleet) -> None:
    keys = fleet.app.keys
    spec = {"taskType": "inference", "model": {"source": {"type": "local", "identifier": "/models/one"}}}
    signed = ServedModels(fleet.app.redis, keys, fleet.app.signer)
    assert signed.serve(ServedModel(name="tiny", spec=spec)) == "served"
    assert list(signed.all()) == ["tiny"]
    record = json.loads(fleet.app.redis.hget(keys.served, "tiny"))
    record["spec"]["model"]["source"]["identifier"] = "/models/evil"
    fleet.app.redis.hset(keys.served, "tiny", json.dumps(record))
    assert signed.all() == {} and signed.find("tiny") is None
    assert signed.stop("tiny")


@pytest.mark.filterwarnings("ignore:RedBeat will stop:DeprecationWarning")
def test_beat_submits_the_periodic_tasks_of_its_code_alone(fleet: TestFleet) -> None:
    fleet.app.conf.beat_schedule = {"ours": {"task": "plain_tasks.add", "schedule": 3600.0, "args": (1, 2)}}
    scheduler = Scheduler(app=fleet.app, lazy=True)
    try:
        scheduler.setup_schedule()
        entry_class = scheduler.Entry
        key = entry_class.generate_key(fleet.app, "ours")
        ours = entry_class.from_key(key, app=fleet.app)
        sent = scheduler.apply_async(ours, advance=False)
        assert sent is not None
        assert sent.get(timeout=patient(SECONDS)) == 3
        ours.args = [2, 2]
        foreign = entry_class("theirs", "plain_tasks.add", ours.schedule, args=[1, 2], app=fleet.app)
        assert scheduler.apply_async(ours, advance=False) is None
        assert scheduler.apply_async(foreign, advance=False) is None
    finally:
        fleet.app.conf.beat_schedule = {}


def test_a_broadcast_that_lets_workers_elect_one_to_submit_a_task_submits_none(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    action = {"task": "plain_tasks.mark", "args": [str(tmp_path)], "kwargs": {}, "options": {}, "immutable": True}
    fleet.app.control.broadcast("election", arguments={"id": "1", "topic": "task", "action": action})
    assert plain(fleet, "add", 1, 1).apply_async().get(timeout=patient(SECONDS)) == 2
    assert not list(tmp_path.iterdir())


def doctor(fleet: TestFleet, **env: str) -> dict[str, list[str]]:
    """Return what `gpuflow doctor` says of signing: name of the check -> its status and text each time."""
    command = [sys.executable, "-c", "from gpuflow.cli import main; main()", "doctor", "--json"]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    base = {**kept, "REDIS_URL": fleet.broker.url, "HOME": str(fleet.folder)}
    done = subprocess.run(
        command, env={**base, **env}, cwd=fleet.folder, capture_output=True, text=True, timeout=patient(60), check=False
    )
    told: dict[str, list[str]] = {}
    for one in json.loads(done.stdout)["checks"]:
        if one["name"].startswith("signing"):
            told.setdefault(one["name"], []).append(f"{one['status']}: {one['detail']}")
    return told


def test_doctor_says_whether_signing_is_on_and_whether_keys_differ(fleet: TestFleet, worker: WorkerProcess) -> None:
    signer = fleet.app.signer
    assert signer is not None
    ours = signer.public()["key"]
    same = {name: fleet.env[name] for name in ("GPUFLOW_SIGNING", "GPUFLOW_SIGNING_KEY_FILE")}
    assert doctor(fleet, **same) == {"signing": [f"ok: require with key {ours}"]}
    other = key_file(fleet.folder, name="other.key")
    (told,) = doctor(fleet, **signing_env(other))["signing of workers"]
    assert told.startswith("warn: ") and "w1" in told and "refuse what key" in told
    assert "require signatures, and this process signs nothing" in doctor(fleet)["signing of workers"][0]
    assert "warn: GPUFLOW_SIGNING is off" in doctor(fleet, GPUFLOW_SIGNING_KEY_FILE=str(other))["signing"][0]
    other.chmod(0o644)
    assert "fail: GPUFLOW_SIGNING_KEY_FILE" in doctor(fleet, **signing_env(other))["signing"][0]


def test_a_worker_whose_key_cannot_be_read_does_not_start(fleet: TestFleet, tmp_path: Path) -> None:
    lost = fleet.spawn_worker("lost", env={"GPUFLOW_SIGNING_KEY_FILE": str(tmp_path / "none")})
    assert lost.process.wait(timeout=patient(30)) != 0
    assert "GPUFLOW_SIGNING_KEY_FILE" in lost.log() and "cannot be read" in lost.log()


def test_what_is_stored_by_others_cannot_be_resumed(fleet: TestFleet, worker: WorkerProcess) -> None:
    run = submit_pipeline({"stages": [{"name": "one", "spec": fleet.echo(output=1, fail=NO)}]}, app=fleet.app)
    eventually(lambda: run.record().state.final, within=SECONDS, what="the failure")
    fleet.app.redis.hset(fleet.app.keys.pipeline(run.id), "owner", "root")
    with pytest.raises(GPUFlowError, match="does not fit"):
        run.resume()
