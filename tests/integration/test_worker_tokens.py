"""Workers with a token of their own: the least rights under which everything works, and a cut that is felt at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import chord

from gpuflow.client import submit, submit_pipeline
from gpuflow.ledger.states import TaskState
from gpuflow.tokens.store import TokenStore
from gpuflow.tokens.workers import Login, WorkerTokens
from tests.fixtures.fleets import OPTIONS
from tests.support.engines import SCRIPTED, build
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient

PREFIX = "t1:"
PLAIN = ("--include", "plain_tasks")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    folder = tmp_path_factory.mktemp("tokens")
    build(folder / "envs", SCRIPTED, variant="cpu")
    env = {"GPUFLOW_KEY_PREFIX": PREFIX, "GPUFLOW_ENV_DIR": str(folder / "envs"), "HEARTBEAT_INTERVAL_SEC": "1"}
    made = TestFleet(folder, env, options=OPTIONS)
    try:
        yield made
    finally:
        made.close()


def store_of(fleet: TestFleet) -> TokenStore:
    return TokenStore(fleet.app.redis, fleet.app.keys)


def tokens_of(fleet: TestFleet) -> WorkerTokens:
    return WorkerTokens(fleet.app.redis, store_of(fleet), address=fleet.broker.url, queues=["tasks"])


def start(fleet: TestFleet, login: Login, *options: str, env: dict[str, str] | None = None) -> WorkerProcess:
    worker = WorkerProcess(
        login.url, fleet.folder, login.record.name, *fleet.options, *options, env={**fleet.env, **(env or {})}
    )
    fleet.workers.append(worker)
    return worker.ready()


def refusals(fleet: TestFleet) -> list[tuple[str, str, str]]:
    """Return what the server has refused to users since the log was reset: reason, object, user."""
    return [(one["reason"], one["object"], one["username"]) for one in fleet.broker.client.acl_log()]


@pytest.fixture(scope="module")
def restricted(shared: TestFleet) -> WorkerProcess:
    """A worker that logs in with its token, and has it from a file for the gateway."""
    shared.broker.client.acl_log_reset()
    login = tokens_of(shared).create("w1", labels={"site": "a"})
    file = shared.folder / "token"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as opened:
        opened.write(login.token.text + "\n")
    return start(shared, login, "--worker-token-file", str(file), "--max-jobs", "3", *PLAIN)


def test_a_worker_brings_results_to_the_gateway_by_its_token(shared: TestFleet, tmp_path: Path) -> None:
    with Gateway(tmp_path, env={"REDIS_URL": shared.broker.url, "GPUFLOW_KEY_PREFIX": PREFIX}) as front:
        login = tokens_of(shared).create("sender", labels={})
        env = {
            "GPUFLOW_STORE_URL": front.results_url,
            "GPUFLOW_WORKER_TOKEN": login.token.text,
            "RESULTS_DIR": str(tmp_path / "own"),
        }
        worker = start(shared, login, "--label", "place=sends", env=env)
        there = {"resources": {"labels": {"place": "sends"}}}
        made = [
            submit({**shared.echo(output="a", artifact="one.txt"), **there}, app=shared.app),
            submit({**shared.echo(output="x" * (2 << 20)), **there}, app=shared.app),
            *(submit({**shared.echo(output="m"), "merge": "always", **there}, app=shared.app) for _ in range(2)),
        ]
        stages = [
            {"name": "one", "spec": {**shared.echo(output="y" * (2 << 20)), **there}},
            {"name": "two", "spec": {**shared.echo(output="${one.result.output}"), **there}},
        ]
        run = submit_pipeline(
            {"apiVersion": "gpuflow/v1", "metadata": {"name": "p"}, "spec": {"stages": stages}}, app=shared.app
        )
        ended = [task.wait(timeout=patient(60)) for task in made]
        run.wait(timeout=patient(60))

        assert [(str(one.state), one.error) for one in ended] == [("SUCCEEDED", None)] * 4
        assert str(run.state) == "SUCCEEDED", run.status()
        assert f"{made[0].id}/attempt-1/one.txt" in front.files()
        assert login.token.text not in worker.log() + front.log
        worker.stop()


def test_a_restricted_worker_does_work_of_every_kind_and_is_refused_nothing(
    shared: TestFleet, restricted: WorkerProcess
) -> None:
    app = shared.app
    merged = {"taskType": "echo", "echo": {"output": "m"}, "merge": "always"}
    ask = {
        "taskType": "inference",
        "model": {"source": {"type": "local", "identifier": "/models/one"}},
        "data": {"type": "list", "items": ["hello"]},
        "resources": {"hardware": {"gpu": {"count": 0}}},
    }
    stages = [
        {"name": "one", "spec": shared.echo(output=1)},
        {"name": "two", "spec": {"taskType": "echo", "echo": {"output": "${one.result.output}"}}},
    ]

    tasks = [submit(shared.echo(output=number, steps=2), app=app) for number in range(2)]
    tasks += [submit(merged, app=app) for _ in range(3)]
    failing = submit(
        {**shared.echo(fail={"retryable": True, "attempts": 1}), "retry": {"backoff_seconds": 0.2}}, app=app
    )
    session = submit(ask, app=app)
    run = submit_pipeline({"apiVersion": "gpuflow/v1", "metadata": {"name": "p"}, "spec": {"stages": stages}}, app=app)
    delayed = app.send_task("gpuflow.echo", kwargs={"spec": shared.echo(output=7)}, countdown=1)
    added = app.send_task("plain_tasks.add", args=(2, 3))
    echoes = [app.signature("gpuflow.echo", kwargs={"spec": shared.echo(output=number)}) for number in range(3)]
    joined = chord(echoes)(app.signature("plain_tasks.add", args=(40, 2), immutable=True))
    sleeper = submit(shared.echo(until_exists=str(shared.folder / "never")), app=app)
    eventually(lambda: sleeper.state == "RUNNING", what="a task that runs")
    sleeper.cancel()

    assert [task.get(timeout=patient(60))["output"] for task in tasks] == [0, 1, "m", "m", "m"]
    failing.get(timeout=patient(60))
    assert session.get(timeout=patient(60))["items"]
    run.wait(timeout=patient(60))
    assert str(run.state) == "SUCCEEDED"
    assert delayed.get(timeout=patient(60))["output"] == 7
    assert added.get(timeout=patient(60)) == 5
    assert joined.get(timeout=patient(60)) == 42
    assert sleeper.wait(timeout=patient(30)).state is TaskState.CANCELLED
    assert app.control.ping(timeout=patient(30), limit=1)
    assert refusals(shared) == []
    assert "NOPERM" not in restricted.log() and "no permissions" not in restricted.log()


def test_a_rotated_worker_is_cut_at_once_and_its_task_has_one_result(shared: TestFleet) -> None:
    short = {"GPUFLOW_LEASE_SEC": "4"}
    login = tokens_of(shared).create("cut", labels={})
    only_there = {"resources": {"labels": {"place": "here"}}}
    worker = start(shared, login, "--label", "place=here", env=short)
    task = submit({**shared.echo(output="once", until_exists=str(shared.folder / "go")), **only_there}, app=shared.app)
    eventually(lambda: task.state == "RUNNING", what="the task on the worker that is cut")

    rotated = tokens_of(shared).rotate("cut")
    user = f"gpuflow-worker-{login.record.id}"

    assert rotated.connections_cut >= 2
    assert not [one for one in shared.broker.client.client_list() if one["user"] == user]
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis.from_url(login.url).ping()
    with redis.Redis.from_url(rotated.url) as client:
        assert client.ping()
    second = shared.start_worker("second", "--label", "place=here", env=short)
    (shared.folder / "go").touch()
    assert task.get(timeout=patient(60))["output"] == "once"
    record = task.record()
    # More attempts where this machine stalls for longer than the short lease; still one result, and it is of `second`.
    assert record.worker == second.name
    assert record.attempt >= 2
    outcomes = [entry.outcome for entry in shared.app.ledger.attempts(task.id)]
    assert outcomes.count("succeeded") == 1, outcomes
    assert worker.process.wait(timeout=patient(30)) == 2
    said = [line for line in worker.log().splitlines() if "token_refused" in line]
    assert len(said) == 1, said
    assert rotated.token.text not in worker.log() and login.token.text not in worker.log()


def test_a_worker_whose_login_is_gone_when_its_broker_comes_back_ends(shared: TestFleet) -> None:
    """The last one of this file: the server comes back without any user of this fleet."""
    login = tokens_of(shared).create("forgotten", labels={})
    worker = start(shared, login, env={"GPUFLOW_LEASE_SEC": "4"})
    shared.broker.kill()
    eventually(lambda: "broker_lost" in worker.log(), what="the worker's line")
    shared.broker.restart()

    assert worker.process.wait(timeout=patient(60)) == 2
    assert worker.log().count("token_refused") == 1
