"""The pages of a real `celery -A gpuflow flower`, with a real worker: what they show, what they let nobody do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gpuflow.client import submit, submit_pipeline
from gpuflow.errors import TaskDead, TaskFailed
from gpuflow.fleet.queue_rows import queue_rows
from gpuflow.fleet.registry import Fleet, WorkerEntry, WorkerState
from tests.support.fleet import TestFleet
from tests.support.monitored_fleet import HOSTILE, FlowerProcess
from tests.support.waiting import eventually, patient

PAGES = ("fleet", "queues", "pipelines", "scaling", "dead-letters", "merge")


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One worker for all tests of this file."""
    long_fleet.start_worker("w1", "--label", "team=nlp")
    return long_fleet


@pytest.fixture(scope="module")
def flower(fleet: TestFleet) -> Iterator[FlowerProcess]:
    with FlowerProcess(fleet) as process:
        yield process


@pytest.fixture
def user(flower: FlowerProcess) -> Iterator[httpx.Client]:
    with flower.client() as client:
        yield client


def token_of(user: httpx.Client) -> str:
    found = re.search(r'data-token="([^"]+)"', user.get("/fleet").text)
    assert found
    return found[1]


def act(user: httpx.Client, action: str, target: str, **headers: str) -> httpx.Response:
    sent = {"X-XSRFToken": token_of(user), **headers}
    return user.post("/monitor/action", json={"action": action, "target": target}, headers=sent)


def rows(user: httpx.Client, page: str, container: str) -> dict[str, str]:
    found: dict[str, str] = user.get(f"/{page}/updates").json()["containers"].get(container, {"rows": {}})["rows"]
    return found


def pipeline(fleet: TestFleet, name: str, *specs: dict[str, Any]) -> Any:
    stages = [{"name": f"s{number}", "spec": spec} for number, spec in enumerate(specs)]
    template = {"apiVersion": "gpuflow/v1", "metadata": {"name": name}, "spec": {"taskType": "echo", "stages": stages}}
    return submit_pipeline(template, app=fleet.app)


def failing() -> dict[str, Any]:
    return {"taskType": "echo", "echo": {"fail": {"message": "boom", "retryable": True}}, "retry": {"max_attempts": 1}}


def test_pages_are_shown_and_are_in_the_bar_of_flower(user: httpx.Client) -> None:
    for page in PAGES:
        answer = user.get(f"/{page}")
        assert answer.status_code == 200, page
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=|https?://", answer.text), page
        assert user.get(f"/{page}/updates").headers["content-type"] == "application/json"
    bar = user.get("/workers").text
    for page in PAGES:
        assert f'href="/{page}"' in bar
    for asset in ("monitor.js", "monitor.css"):
        assert user.get(f"/monitor-assets/{asset}").status_code == 200


def test_nobody_sees_them_without_the_login(flower: FlowerProcess) -> None:
    with flower.client(login=None) as stranger:
        for path in (*PAGES, *(f"{page}/updates" for page in PAGES), "pipelines/x", "pipelines/x/updates"):
            answer = stranger.get(f"/{path}")
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"].startswith("Basic")
    with flower.client(login="ana:wrong") as stranger:
        assert stranger.get("/fleet").status_code == 401


def test_the_fleet_is_that_of_the_registry(fleet: TestFleet, user: httpx.Client) -> None:
    row = rows(user, "fleet", "workers")["w1"]
    assert "team=nlp" in row
    assert 'data-action="drain"' in row
    # and what has not changed is not sent again
    version = user.get("/fleet/updates").json()["version"]
    epoch = version.split(".")[0]
    eventually(lambda: user.get("/fleet/updates").json()["version"] != version, what="another reading")
    assert user.get("/fleet/updates", params={"since": version}).json()["version"].startswith(epoch)


def test_a_queue_says_why_nothing_moves(fleet: TestFleet, user: httpx.Client) -> None:
    task = submit({**fleet.echo(message="x"), "resources": {"hardware": {"gpu": {"type": "h100", "count": 8}}}},
                  app=fleet.app)  # fmt: skip
    queue = fleet.app.ledger.get(task.id).queue

    def reason() -> str:
        found = rows(user, "queues", "queues").get(queue, "")
        return found if "cannot start" in found else ""

    row = eventually(reason, what="the reason of the queue")
    assert "nobody" in row
    assert "w1" in row
    # When it is cancelled by its button, nothing waits any more
    assert act(user, "cancel", task.id).json() == {"message": f"{task.id} is cancelled"}
    assert fleet.state(task.id) == "CANCELLED"
    assert act(user, "cancel", task.id).status_code == 409


def test_the_broker_page_of_flower_shows_the_queues_that_there_are(fleet: TestFleet, user: httpx.Client) -> None:
    def lengths() -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in user.get("/api/queues/length").json()["active_queues"]}

    # Given a queue that appears with what is asked for, which nobody serves
    assert not [name for name in lengths() if "h200" in name]
    ask = {**fleet.echo(message="x"), "resources": {"hardware": {"gpu": {"type": "h200", "count": 4}}}}
    tasks = [submit({**ask, "priority": priority}, app=fleet.app) for priority in (1, 5, 9)]
    queue = fleet.app.ledger.get(tasks[0].id).queue
    # Then it is there, of all priorities, before those in which nothing waits
    found = lengths()
    assert found[queue] == {
        "name": queue, "messages": 3, "messages_ready": 3, "messages_unacknowledged": 0, "consumers": 0,
    }  # fmt: skip
    assert next(iter(found)) == queue
    # and so are those that the worker serves, as `gpuflow queues` says
    rows = queue_rows(fleet.app.redis, fleet.app.keys, fleet.app.settings.task_topic)
    assert {name: row["consumers"] for name, row in found.items() if name != queue} == {
        row["name"]: len(row["workers"]) for row in rows if row["workers"]
    }
    page = user.get("/broker").text
    for name in found:
        assert f"<td>{name}</td>" in page
    # When nothing waits in it any more, it goes
    for task in tasks:
        task.cancel()
    assert queue not in lengths()
    assert f"<td>{queue}</td>" not in user.get("/broker").text


def test_a_pipeline_is_shown_with_its_stages_and_resumed(fleet: TestFleet, user: httpx.Client) -> None:
    run = pipeline(fleet, HOSTILE, fleet.echo(message="a"), failing())
    with pytest.raises(TaskFailed):
        run.wait(timeout=patient(60))
    row = eventually(lambda: rows(user, "pipelines", "pipelines").get(run.id), what="the pipeline in the list")
    assert "<script" not in row
    assert 'data-action="resume"' in row
    page = user.get(f"/pipelines/{run.id}").text
    for part in ('class="graph"', 'class="attempt state-succeeded"', "boom", 'id="log"'):
        assert part in page
    assert "<img" not in page
    resumed = act(user, "resume", run.id)
    assert resumed.json() == {"message": f"{run.id} is resumed"}
    with pytest.raises(TaskFailed):
        run.wait(timeout=patient(60))
    assert user.get("/pipelines/none").status_code == 404
    assert user.get("/pipelines/none/updates").status_code == 404


def test_dead_letters_are_retried_and_purged(fleet: TestFleet, user: httpx.Client) -> None:
    task = submit(failing(), app=fleet.app)
    with pytest.raises((TaskDead, TaskFailed)):
        task.get(timeout=patient(60))
    if fleet.state(task.id) != "DEAD":
        pytest.fail(f"the task is {fleet.state(task.id)}, no dead letter")
    row = eventually(lambda: rows(user, "dead-letters", "dead").get(task.id), what="the dead letter")
    assert "boom" in row
    assert act(user, "dead-retry", task.id).status_code == 200
    eventually(lambda: fleet.app.ledger.attempts(task.id) and fleet.state(task.id) == "DEAD", what="its second death")
    assert act(user, "dead-purge", task.id).json() == {"message": f"{task.id} is forgotten"}
    assert fleet.state(task.id) == "UNKNOWN"
    assert act(user, "dead-purge", task.id).status_code == 404


def test_a_worker_is_disabled_and_enabled(fleet: TestFleet, user: httpx.Client) -> None:
    registry = Fleet(fleet.app.redis, fleet.app.keys)

    def follows(enabled: bool) -> bool:
        found = registry.find("w1")
        return found is not None and found.enabled is enabled

    assert act(user, "disable", "w1").status_code == 200
    eventually(lambda: follows(False), what="the disabled worker")
    assert 'data-action="enable"' in rows(user, "fleet", "workers")["w1"]
    assert "w1" in rows(user, "scaling", "desired")
    assert act(user, "release", "w1").status_code == 200
    eventually(lambda: follows(True), what="the enabled worker")
    assert act(user, "drain", "nobody").status_code == 409


@pytest.mark.parametrize(
    "headers",
    [
        {"X-XSRFToken": "wrong"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "null"},
    ],
)
def test_an_action_of_another_page_is_refused(fleet: TestFleet, user: httpx.Client, headers: dict[str, str]) -> None:
    assert act(user, "disable", "w1", **headers).status_code == 403
    worker = Fleet(fleet.app.redis, fleet.app.keys).find("w1")
    assert worker is not None
    assert worker.takes_work


def test_a_login_alone_is_no_token(user: httpx.Client, flower: FlowerProcess) -> None:
    body = {"action": "disable", "target": "w1"}
    assert user.post("/monitor/action", json=body).status_code == 403
    token = token_of(user)
    with flower.client(login=None) as stranger:
        headers = {"X-XSRFToken": token, "Cookie": f"_xsrf={token}"}
        assert stranger.post("/monitor/action", json=body, headers=headers).status_code == 401


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"action": 1, "target": "x"}', b'{"action": "disable"}', b'{"action": "shell", "target": "x"}',
     b'{"action": "disable", "target": ""}', b'{"action": "disable", "target": "' + b"x" * 300 + b'"}', b"\xff\xfe"],
)  # fmt: skip
def test_what_is_no_action_is_refused(user: httpx.Client, body: bytes) -> None:
    answer = user.post("/monitor/action", content=body, headers={"X-XSRFToken": token_of(user)})
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_read_only_flower_offers_and_does_nothing(fleet: TestFleet) -> None:
    env = {"GPUFLOW_FLOWER_READ_ONLY": "1"}
    with FlowerProcess(fleet, "read-only", env=env) as process, process.client() as reader:
        assert "data-action=" not in "".join(rows(reader, "fleet", "workers").values())
        assert "GPUFLOW_FLOWER_READ_ONLY" in reader.get("/fleet").text
        answer = act(reader, "disable", "w1")
        assert answer.status_code == 403
        assert "GPUFLOW_FLOWER_READ_ONLY" in answer.json()["error"]
        # nor does Flower's own API
        assert reader.post("/api/worker/shutdown/w1").status_code == 403


def test_read_only_holds_without_the_pages_and_over_flowers_own_options(fleet: TestFleet) -> None:
    file = fleet.folder / "flower_options.py"
    file.write_text("read_only = False\n")
    options = ("--no-fleet-pages", "--read-only=false", f"--conf={file}")
    env = {"GPUFLOW_FLOWER_READ_ONLY": "1"}
    with FlowerProcess(fleet, "bare", *options, env=env) as process, process.client() as reader:
        assert reader.get("/fleet").status_code == 404
        node = eventually(
            lambda: next(iter(reader.get("/api/workers", params={"refresh": "1"}).json()), ""),
            within=60,
            what="the worker in Flower's list",
        )
        assert "worker-shutdown" not in reader.get(f"/worker/{node}").text
        for path in (f"worker/shutdown/{node}", f"worker/pool/grow/{node}", "task/revoke/none", "task/send-task/x"):
            assert reader.post(f"/api/{path}").status_code == 403, path
        assert node in reader.get("/api/workers", params={"refresh": "1"}).json()


def test_flower_logs_as_it_is_set(fleet: TestFleet) -> None:
    with FlowerProcess(fleet, "logs", env={"LOG_FORMAT": "json", "LOG_LEVEL": "DEBUG"}) as process:
        whole = process.log_path.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
    assert any("Visit me at" in str(line.get("message")) for line in lines)
    assert "DEBUG" in {line["level"] for line in lines}


def test_a_flower_without_login_is_read_only(fleet: TestFleet) -> None:
    env = {"FLOWER_BASIC_AUTH": "", "FLOWER_UNAUTHENTICATED_API": "true"}
    with FlowerProcess(fleet, "open", env=env) as process, process.client(login=None) as anyone:
        page = anyone.get("/fleet")
        assert "FLOWER_BASIC_AUTH" in page.text
        assert "access-control-allow-origin" not in page.headers
        assert act(anyone, "disable", "w1").status_code == 403
        assert "data-action=" not in "".join(rows(anyone, "fleet", "workers").values())


@pytest.mark.parametrize(
    "fields",
    [{"load": "[]"}, {"capability": "[]"}, {"capability": '{"gpus": ["x"]}'}, {"tasks": "[1]"}, {"state": "ASLEEP"}],
)
def test_a_worker_whose_entry_is_odd_breaks_no_page(
    fleet: TestFleet, user: httpx.Client, fields: dict[str, str]
) -> None:
    registry = Fleet(fleet.app.redis, fleet.app.keys)
    entry = WorkerEntry(id="odd", state=WorkerState.IDLE, interval_seconds=30, timeout_seconds=600)
    task = submit({**fleet.echo(message="x"), "resources": {"labels": {"no": "such"}}}, app=fleet.app)
    queue = fleet.app.ledger.get(task.id).queue
    registry.announce(entry)
    fleet.app.redis.hset(fleet.app.keys.worker("odd"), mapping=fields)
    try:
        row = eventually(lambda: rows(user, "fleet", "workers").get("odd"), what="its row")
        assert "cannot be read" in row
        assert "team=nlp" in rows(user, "fleet", "workers")["w1"]
        assert "cannot start" in eventually(lambda: rows(user, "queues", "queues").get(queue), what="the queue")
    finally:
        registry.forget("odd")
        task.cancel()
