"""Many tasks at once: filters find them, and cancel, retry and purge reach all of them and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import chord
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from click.testing import CliRunner, Result

from gpuflow.bulk import cancel_many, retry_many
from gpuflow.cli import cli
from gpuflow.client import submit, submit_pipeline
from gpuflow.ledger import result_consumer
from gpuflow.ledger.selection import Selection, select
from gpuflow.ledger.states import TaskState
from gpuflow.upkeep.reconciler import Reconciler
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

Command = Callable[..., Result]


@pytest.fixture
def command(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command against the fleet of the test."""
    monkeypatch.setenv("REDIS_URL", fleet.broker.url)
    monkeypatch.setenv("GPUFLOW_STATE_DIR", str(fleet.folder / "state"))

    def run(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(cli, list(arguments), standalone_mode=False)
        assert done.exception is None or code, done.output
        return done

    return run


def template(owner: str, name: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "gpuflow/v1",
        "kind": "Task",
        "metadata": {"name": name, "owner": owner, "labels": labels},
        "spec": {"taskType": "echo", "echo": {"output": 1}, "resources": {"hardware": {"gpu": {"count": 0}}}},
    }


def test_what_filters_select_is_cancelled_and_nothing_else(fleet: TestFleet) -> None:
    app = fleet.app
    mine = [submit(template("ana", f"night-{n}", team="nlp"), app=app) for n in range(30)]
    others = [submit(template("ben", f"night-{n}", team="vision"), app=app) for n in range(5)]

    selected = select(app.ledger, Selection(owner="ana", labels={"team": "n*"}))
    assert [record.id for record in selected] == [task.id for task in reversed(mine)]
    verdicts = cancel_many(app, [record.id for record in selected])

    assert Counter(verdicts.values()) == {"cancelled": 30}
    assert {task.state for task in mine} == {TaskState.CANCELLED}
    assert {task.state for task in others} == {TaskState.QUEUED}
    assert {AsyncResult(task.id, app=app).state for task in mine} == {"REVOKED"}
    assert fleet.broker.client.llen(others[0].record().queue) == 5
    assert cancel_many(app, [mine[0].id, "nobody"]) == {mine[0].id: "final", "nobody": "unknown"}


def test_all_that_was_cancelled_of_a_pipeline_fails_it_once(fleet: TestFleet) -> None:
    app = fleet.app
    worker = fleet.start_worker("w1", "--max-jobs", "1")
    blocker = submit(fleet.echo(sleep_seconds=600), app=app)
    eventually(lambda: blocker.state == TaskState.RUNNING)
    many = {"data": {"type": "list", "items": list("abcdef")}, "parallel": {"enabled": True, "max_shards": 3}}
    cpu = {"hardware": {"gpu": {"count": 0}}}
    pipeline = {
        "apiVersion": "gpuflow/v1",
        "kind": "Pipeline",
        "metadata": {"name": "wide", "labels": {"run": "7"}},
        "spec": {"taskType": "echo", "echo": {}, "resources": cpu, "stages": [{"name": "many", "spec": many}]},
    }
    run = submit_pipeline(pipeline, app=app)
    selection = Selection(pipeline=run.id, labels={"run": "7"})
    tasks = eventually(lambda: select(app.ledger, selection))

    verdicts = cancel_many(app, [record.id for record in [*tasks, blocker.record()]])

    assert verdicts[blocker.id] == "requested"
    assert {verdicts[record.id] for record in tasks} == {"cancelled"}
    eventually(lambda: run.record().state.final)
    eventually(lambda: blocker.state == TaskState.CANCELLED)
    eventually(lambda: not worker.supervised())


def test_failed_tasks_are_listed_and_retried_together(fleet: TestFleet, command: Command) -> None:
    app = fleet.app
    fleet.start_worker("w1")
    failing = [submit(fleet.echo(fail={"message": "no", "retryable": False}), app=app) for _ in range(3)]
    fine = submit(fleet.echo(output=1), app=app)
    for task in [*failing, fine]:
        task.wait(timeout=patient(60))

    listed = json.loads(command("status", "--state", "failed", "--state", "dead", "--json").stdout)
    assert {task["id"] for task in listed["tasks"]} == {task.id for task in failing}
    dry = json.loads(command("retry", "--all", "--dry-run", "--json").stdout)
    assert {task["id"] for task in dry["tasks"]} == {task.id for task in failing}
    assert {task.record().attempt for task in failing} == {1}
    queued = json.loads(command("retry", "--state", "failed", "--newer-than", "1h", "--yes", "--json").stdout)

    assert queued["queued"] == [task.id for task in failing]  # in this order they run
    for task in failing:
        eventually(lambda task=task: task.record().attempt == 2 and task.state == TaskState.FAILED)
    assert fine.record().attempt == 1
    assert retry_many(app, [fine.id, "nobody"]) == {fine.id: "not ended or succeeded", "nobody": "unknown"}


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["cancel"], "name the tasks, choose them by filters such as --owner, or --all"),
        (["cancel", "x", "--owner", "ana"], "not both"),
        (["cancel", "--state", "asleep"], "is no state of a task; there are PENDING"),
        (["cancel", "--older-than", "soon"], "--older-than 'soon' is not a duration"),
        (["cancel", "--label", "=x"], "names no label"),
        (["status", "x", "--owner", "ana"], "filters select them"),
        (["status", "x", "y", "--watch"], "--watch follows one"),
        (["status", "x", "y"], "no task or pipeline 'x', 'y'"),
        (["cancel", "x", "KEPT", "y"], "no task or pipeline 'x', 'y'; nothing was done"),
        (["retry", "x", "KEPT"], "no task or pipeline 'x'; nothing was done"),
        (["dead", "purge", "KEPT", "x"], "no task or pipeline 'x'; nothing was done"),
        (["dead", "purge", "KEPT"], "not among the dead letters"),
        (["dead", "--owner", "ana", "retry", "--all"], "stand after that word"),
        (["dead", "purge", "--state", "failed"], "dead letters are tasks in state DEAD"),
        (["retry", "--all", "--owner", "ana", "x"], "not both"),
    ],
)
def test_what_cannot_be_meant_changes_nothing(
    fleet: TestFleet, command: Command, arguments: list[str], cause: str
) -> None:
    waiting = submit(template("ana", "kept"), app=fleet.app)
    done = command(*[waiting.id if word == "KEPT" else word for word in arguments], code=2)
    assert cause in str(done.exception)
    assert waiting.state == TaskState.QUEUED


def test_several_ids_and_filters_are_shown_with_ages(fleet: TestFleet, command: Command) -> None:
    app = fleet.app
    first, second = (submit(template("ana", name), app=app) for name in ("one", "two"))
    stage = {"name": "a", "spec": {"taskType": "echo", "echo": {}, "resources": {"hardware": {"gpu": {"count": 0}}}}}
    run = submit_pipeline({"apiVersion": "gpuflow/v1", "metadata": {"name": "p"}, "spec": {"stages": [stage]}}, app=app)

    shown = json.loads(command("status", second.id, run.id, first.id, "--json").stdout)

    assert [one["id"] for one in shown["tasks"]] == [second.id, first.id]
    assert [one["id"] for one in shown["pipelines"]] == [run.id]
    for listed in (command("status", first.id, run.id), command("status", "--owner", "ana"), command("status")):
        assert first.id in listed.stdout and " s ago" in listed.stdout
    assert " s ago)" in command("status", first.id).stdout
    assert command("dead", "--owner", "ana").stderr.startswith("no dead letters that all of these")


def test_what_is_not_tried_again_says_why(fleet: TestFleet, command: Command) -> None:
    waiting, ended = (submit(template("ana", name), app=fleet.app) for name in ("waits", "ends"))
    assert ended.cancel() == "cancelled"

    told = command("retry", ended.id, waiting.id)

    assert "1 of 2 queued again" in told.stdout
    assert "not tried again: 1 (not ended or succeeded)" in told.stderr


def test_a_command_waits_for_the_broker_and_says_so(fleet: TestFleet) -> None:
    task = submit(template("ana", "kept"), app=fleet.app)
    fleet.broker.kill()
    environment = {**os.environ, "REDIS_URL": fleet.broker.url, "GPUFLOW_SUBMIT_TIMEOUT_SEC": "600"}
    line = [sys.executable, "-c", "from gpuflow.cli import main; main()", "status", task.id, "--json"]
    with subprocess.Popen(
        line, env=environment, cwd=fleet.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        try:
            assert command.stderr is not None
            assert "waiting 600 s for it" in command.stderr.readline()
            fleet.broker.restart()
            out, errors = command.communicate(timeout=patient(60))
        finally:
            command.kill()
    assert command.returncode == 0, errors
    assert json.loads(out)["id"] == task.id


def test_who_follows_a_drain_or_a_task_hears_of_an_outage_and_of_the_end(fleet: TestFleet) -> None:
    fleet.start_worker("w1")
    gate = fleet.folder / "gate"
    task = submit(fleet.echo(until_exists=str(gate)), app=fleet.app)
    eventually(lambda: task.state == TaskState.RUNNING)
    pipe = subprocess.PIPE
    environment = {**os.environ, "REDIS_URL": fleet.broker.url}

    def started(*words: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", "from gpuflow.cli import main; main()", *words]
        return subprocess.Popen(line, env=environment, cwd=fleet.folder, text=True, stdout=pipe, stderr=pipe)

    with started("logs", "-f", task.id) as logs, started("workers", "drain", "w1", "--wait") as drain:
        try:
            assert logs.stdout is not None and drain.stdout is not None and logs.stderr is not None
            assert "QUEUED" in logs.stdout.readline()
            assert drain.stdout.readline() == "w1 takes nothing new; it runs 1\n"
            fleet.broker.kill()
            assert "the broker does not answer" in logs.stderr.readline()
            fleet.broker.restart()
            assert logs.stderr.readline() == "the broker answers again\n"
            gate.touch()
            told, trouble = drain.communicate(timeout=patient(90))
            assert (drain.returncode, told) == (0, "w1 has stopped\n"), trouble
            assert logs.wait(timeout=patient(60)) == 0
        finally:
            logs.kill()
            drain.kill()


def test_a_command_does_not_wait_where_its_password_is_wrong(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", fleet.broker.url.replace("://:", "://:not-"))
    monkeypatch.setenv("GPUFLOW_SUBMIT_TIMEOUT_SEC", "86400")
    done = CliRunner().invoke(cli, ["status"], standalone_mode=False)
    assert "denies this to the user of REDIS_URL" in str(done.exception)


def test_what_was_cancelled_and_never_told_is_told_by_the_reconciler(fleet: TestFleet) -> None:
    app, client = fleet.app, fleet.broker.client
    lost, again, young = (submit(template("ana", name), app=app) for name in ("lost", "again", "young"))
    for task in (lost, again, young):  # as by a process that ends after its step, and before it tells anybody
        app.ledger.cancel(task.id)
    assert again.retry()
    assert AsyncResult(lost.id, app=app).state == "PENDING"
    client.zadd(app.keys.untold, {lost.id: 1, again.id: 1})

    made = Reconciler(app).run()

    assert made["cancel_told"] == 1
    assert AsyncResult(lost.id, app=app).state == "REVOKED"
    assert again.state == TaskState.QUEUED
    assert client.zrange(app.keys.untold, 0, -1) == [young.id]
    assert cancel_many(app, [again.id]) == {again.id: "cancelled"}
    assert client.zrange(app.keys.untold, 0, -1) == [young.id], "who tells at once leaves nothing to be told"


def test_a_dry_run_lists_pipelines_too(fleet: TestFleet, command: Command) -> None:
    stages = [{"name": name, "spec": {"echo": {"output": 1}}} for name in ("a", "b")]
    spec = {"taskType": "echo", "resources": {"hardware": {"gpu": {"count": 0}}}, "stages": stages}
    run = submit_pipeline({"apiVersion": "gpuflow/v1", "kind": "Pipeline", "spec": spec}, app=fleet.app)
    dry = json.loads(command("cancel", run.id, "--dry-run", "--json").stdout)
    assert [one["id"] for one in dry["pipelines"]] == [run.id] and dry["tasks"] == []
    assert not run.record().state.final


def test_who_waits_for_a_task_of_many_hears_of_its_cancel_at_once(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_consumer, "FIRST_LOOK_SECONDS", 3600.0)  # what is not published is not found in time
    app = fleet.app
    tasks = [submit(fleet.echo(output=number), app=app) for number in range(5)]
    waited = app.AsyncResult(tasks[3].id)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waited.get, timeout=patient(60))
        key = app.keys.celery_result(waited.id)
        eventually(lambda: key in fleet.broker.client.pubsub_channels(), what="the subscription")
        cancel_many(app, [task.id for task in tasks])
        with pytest.raises(TaskRevokedError, match="cancelled by a user"):
            waiting.result(timeout=patient(60))
    ttl = fleet.broker.client.ttl(app.keys.celery_result(tasks[0].id))
    assert 0 < ttl <= app.backend.expires
    assert fleet.broker.client.zcard(app.keys.untold) == 0


def test_what_was_queued_again_since_its_cancel_is_not_called_revoked(fleet: TestFleet) -> None:
    app = fleet.app
    task = submit(fleet.echo(output=1), app=app)
    app.ledger.cancel(task.id)
    assert app.ledger.retry_task(task.id)
    app.ledger.tell_cancelled({task.id: "{}"}, 60)
    assert not fleet.broker.client.exists(app.keys.celery_result(task.id))
    assert app.ledger.untold(least_age_seconds=-60) == []


def test_a_cancelled_task_of_many_counts_its_chord(fleet: TestFleet) -> None:
    """What needs more than Celery's entry is told of one by one."""
    app = fleet.app
    fleet.start_worker("w1", "--max-jobs", "4", "--include", "plain_tasks")
    gpu = {"hardware": {"gpu": {"type": "h100", "count": 8}}}
    parts = [app.signature("gpuflow.echo", kwargs={"spec": {**fleet.echo(output=n), "resources": gpu}}) for n in (1, 2)]
    joined = chord(parts)(app.signature("plain_tasks.add", args=(40, 2), immutable=True))
    ids = [part.id for part in joined.parent.results]
    verdicts = cancel_many(app, ids)
    assert set(verdicts.values()) == {"cancelled"}
    eventually(lambda: joined.state == "FAILURE", within=60, what="the failure of what joins them")
