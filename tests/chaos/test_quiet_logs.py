"""What a worker writes while its broker is away, and who says which worker was lost."""

from __future__ import annotations

import json
import signal
import socket
import time

import pytest

from gpuflow.client import submit
from tests.chaos.conftest import LEASE_SECONDS
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.monitored_fleet import FlowerProcess
from tests.support.waiting import eventually

#: The level of Celery's own default, at which gpuflow's own lines are written, too.
OPTIONS = ("--max-jobs", "20", "-l", "WARNING")


def entries(worker: WorkerProcess) -> list[dict[str, object]]:
    """Return the lines of a worker, but those of a machine so busy that a process stood still."""
    lines = [json.loads(line) for line in worker.log().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") != "process_was_stopped"]


@pytest.mark.parametrize("level", ["WARNING", "INFO"])  # INFO: as in the units of systemd and in Compose
def test_an_outage_is_said_once_with_its_cause_and_once_that_it_is_over(fleet: TestFleet, level: str) -> None:
    worker = fleet.start_worker("w1", *OPTIONS[:-1], level, env={"LOG_FORMAT": "json"})
    tasks = [submit(fleet.echo(sleep_seconds=600), app=fleet.app) for _ in range(20)]
    eventually(lambda: {task.state for task in tasks} == {"RUNNING"}, within=60)
    before = len(entries(worker))
    started = {entry["task"] for entry in entries(worker) if entry.get("event") == "task_started"}
    assert started == {task.id for task in tasks}

    fleet.broker.kill()
    eventually(lambda: any(entry.get("event") == "broker_lost" for entry in entries(worker)), within=30)
    fleet.broker.restart()
    eventually(lambda: any(entry.get("event") == "broker_is_back" for entry in entries(worker)), within=60)
    eventually(lambda: fleet.app.control.ping(timeout=0.5), within=60, what="the worker's consumer")

    said = entries(worker)[before:]
    first, *_, last = said
    assert str(first["event"]).startswith("broker_") and "onnect" in str(first["cause"]) and first["level"] == "ERROR"
    assert last["event"] == "broker_is_back" and int(str(last["lines_left_out"])) > 1
    assert len(said) <= 5, said
    assert {task.state for task in tasks} == {"RUNNING"}


@pytest.mark.parametrize("level", ["WARNING", "INFO"])
def test_an_outage_beyond_the_leases_is_a_few_lines_too(fleet: TestFleet, level: str) -> None:
    lease = {"GPUFLOW_LEASE_SEC": str(LEASE_SECONDS)}
    worker = fleet.start_worker("w1", *OPTIONS[:-1], level, env={"LOG_FORMAT": "json", **lease})
    tasks = [submit(fleet.echo(sleep_seconds=600), app=fleet.app) for _ in range(20)]
    eventually(lambda: {task.state for task in tasks} == {"RUNNING"}, within=60)
    before = len(entries(worker))

    fleet.broker.kill()
    eventually(lambda: not worker.supervised(), within=60, what="the end of what ran")
    fleet.broker.restart()
    eventually(lambda: any(entry.get("event") == "broker_is_back" for entry in entries(worker)), within=60)

    eventually(lambda: fleet.app.control.ping(timeout=0.5), within=60, what="the worker's consumer")

    said = entries(worker)[before:]
    said = [one for one in said if one.get("event") != "task_started" and "received" not in str(one.get("message"))]
    (lost,) = [entry for entry in said if entry.get("event") == "leases_lost"]
    assert lost["count"] == 20 and all(task.id in str(lost["tasks"]) for task in tasks)
    assert str(said[0]["event"]).startswith("broker_") and "onnect" in str(said[0]["cause"])
    assert said[-1]["event"] == "broker_is_back", said
    assert len(said) <= 5, said


@pytest.mark.long
def test_a_minute_without_the_broker_is_five_lines(fleet: TestFleet) -> None:
    worker = fleet.start_worker("w1", *OPTIONS[:-1], "INFO", env={"LOG_FORMAT": "json"})
    tasks = [submit(fleet.echo(sleep_seconds=600), app=fleet.app) for _ in range(20)]
    eventually(lambda: {task.state for task in tasks} == {"RUNNING"}, within=60)
    before = len(entries(worker))

    fleet.broker.kill()
    away_until = time.monotonic() + 60
    eventually(lambda: time.monotonic() > away_until, within=120, what="a minute")
    fleet.broker.restart()
    eventually(lambda: any(entry.get("event") == "broker_is_back" for entry in entries(worker)), within=60)
    eventually(lambda: fleet.app.control.ping(timeout=0.5), within=60, what="the worker's consumer")

    said = entries(worker)[before:]
    said = [one for one in said if one.get("event") != "task_started" and "received" not in str(one.get("message"))]
    assert said[0]["event"] == "broker_lost" and "onnect" in str(said[0]["cause"])
    assert said[-1]["event"] == "broker_is_back" and float(str(said[-1]["away_seconds"])) > 50, said
    assert len(said) <= 5, said


def test_a_broker_that_became_a_replica_is_said_once(fleet: TestFleet) -> None:
    worker = fleet.start_worker("w1", "--max-jobs", "20", env={"LOG_FORMAT": "json"})
    before = len(entries(worker))
    with socket.socket() as nobody:  # a primary that does not answer
        nobody.bind(("127.0.0.1", 0))
        fleet.broker.client.execute_command("REPLICAOF", "127.0.0.1", nobody.getsockname()[1])
        eventually(lambda: any(entry.get("event") == "broker_refuses" for entry in entries(worker)), within=30)
        late = fleet.spawn_worker("late", env={"LOG_FORMAT": "json"})
        eventually(lambda: any(entry.get("event") == "broker_refuses" for entry in entries(late)), within=60)
    fleet.broker.client.execute_command("REPLICAOF", "NO", "ONE")
    for one in (worker, late):
        eventually(lambda one=one: "broker_is_back" in one.log(), within=60, what=one.name)
    late.ready()
    task = submit(fleet.echo(output=1), app=fleet.app)
    eventually(lambda: task.state == "SUCCEEDED", within=30)

    said = entries(worker)[before:]
    (refused,) = [entry for entry in said if entry.get("event") == "broker_refuses"]
    assert "read only replica" in str(refused["cause"])
    for one, lines in ((worker, said), (late, entries(late))):
        assert not any("Frequent restarts" in str(entry.get("message")) for entry in lines), one.log()[-3000:]
    known = ("task_started", "task_succeeded")
    trouble = [entry for entry in said if entry.get("event") not in known and "received" not in str(entry)]
    assert len(trouble) <= 10, trouble


def test_flower_says_once_that_its_broker_is_away_whoever_looks_meanwhile(fleet: TestFleet) -> None:
    with FlowerProcess(fleet, env={"LOG_FORMAT": "json"}) as flower, flower.client() as browser:

        def said(event: str) -> list[dict[str, object]]:
            lines = [json.loads(line) for line in flower.log_path.read_text().splitlines() if line.startswith("{")]
            return [line for line in lines if line.get("event") == event]

        eventually(lambda: browser.get("/fleet/updates").status_code == 200, within=30)
        fleet.broker.kill()
        eventually(lambda: browser.get("/fleet/updates").status_code == 503, within=30)
        for _ in range(10):
            assert browser.get("/queues/updates").status_code == 503
        fleet.broker.restart()
        eventually(lambda: browser.get("/fleet/updates").status_code == 200, within=60)

        (lost,), (back,) = said("broker_lost"), said("broker_is_back")
        assert "onnect" in str(lost["cause"]) and int(str(back["lines_left_out"])) >= 20
        assert '"503 GET' not in flower.log_path.read_text()


def test_who_was_lost_and_which_tasks_came_back_is_in_the_log_of_another(fleet: TestFleet) -> None:
    lease = {"GPUFLOW_LEASE_SEC": str(LEASE_SECONDS)}
    lost = fleet.start_worker("lost", *OPTIONS, env=lease)
    task = submit(fleet.echo(sleep_seconds=600), app=fleet.app)
    eventually(lambda: task.state == "RUNNING")
    other = fleet.start_worker("other", *OPTIONS, env=lease)
    lost.send(signal.SIGKILL)

    told = f"event=worker_lost worker=lost queued_again=['{task.id}']"
    eventually(lambda: told in other.log(), within=30, what="the lost worker's name")
    eventually(lambda: f"event=task_started task={task.id} attempt=2 worker=other" in other.log(), within=30)
    assert "event=ready worker=other" in other.log()
