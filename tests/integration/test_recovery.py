"""Retries, dead letters, notices, the reconciler, refusals: by real workers and the real command."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit, submit_pipeline
from gpuflow.errors import BrokerUnavailable, TaskDead
from gpuflow.fleet.registry import Fleet, WorkerEntry, WorkerState
from gpuflow.settings import Settings
from gpuflow.upkeep.duties import Duties
from gpuflow.upkeep.reconciler import Reconciler
from tests.gate import leftovers
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

SOON = {"max_attempts": 3, "backoff_seconds": 0.1}


def out_of_memory(fleet: TestFleet, **echo: Any) -> dict[str, Any]:
    fail = {"type": "OutOfMemory", "message": "full", "retryable": True}
    return {**fleet.echo(fail=fail, stderr="the last words", **echo), "retry": SOON}


def gpuflow(fleet: TestFleet, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from gpuflow.cli import main; main()", *arguments],
        env={"REDIS_URL": fleet.broker.url, "PATH": "/usr/bin:/bin", "HOME": str(fleet.folder)},
        cwd=fleet.folder,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


class Receiver:
    """A real HTTP server that keeps what is posted to it; it refuses the first `refuse` calls."""

    def __init__(self, refuse: int = 0) -> None:
        self.calls: list[dict[str, Any]] = []
        self.refused = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.refused < refuse:
                    outer.refused += 1
                    self.send_response(503)
                else:
                    outer.calls.append({**content, "token": self.headers["X-Token"]})
                    self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver(refuse=1)
    yield made
    made.close()


def test_a_failure_that_may_pass_is_tried_again_and_then_it_is_dead(fleet: TestFleet) -> None:
    fleet.start_worker("w1")
    task = submit(out_of_memory(fleet), app=fleet.app)

    with pytest.raises(TaskDead, match="full"):
        task.get(timeout=patient(60))

    record = task.record()
    assert (record.state, record.attempt, record.failures) == ("DEAD", 3, 2)
    entries = task.attempts()
    assert [(entry.attempt, entry.outcome) for entry in entries] == [(1, "failed"), (2, "failed"), (3, "dead")]
    assert all("the last words" in entry.log_tail for entry in entries)
    assert [letter.id for letter in fleet.app.ledger.dead()] == [task.id]
    celery = fleet.app.AsyncResult(task.id)
    assert eventually(lambda: celery.state == "FAILURE")


def test_dead_letters_are_listed_shown_tried_again_and_forgotten(fleet: TestFleet) -> None:
    fleet.start_worker("w1")
    task = submit(out_of_memory(fleet), app=fleet.app)
    task.wait(timeout=patient(60))

    assert json.loads(gpuflow(fleet, "dead", "--json"))[0]["id"] == task.id
    shown = gpuflow(fleet, "dead", "show", task.id)
    assert "the last words" in shown
    assert "w1" in shown
    assert json.loads(gpuflow(fleet, "dead", "list", "--owner", "nobody", "--json")) == []
    assert task.id in gpuflow(fleet, "dead", "list", "--queue", task.record().queue)
    assert "would retry 1 tasks; nothing was done" in gpuflow(fleet, "dead", "retry", "--all", "--dry-run")
    assert json.loads(gpuflow(fleet, "dead", "purge", task.id, "--dry-run", "--json"))["tasks"][0]["id"] == task.id
    assert task.state == "DEAD"
    gpuflow(fleet, "dead", "retry", task.id)
    eventually(lambda: task.record().attempt == 6 and task.state == "DEAD", within=60)
    assert "1 of 1 forgotten" in gpuflow(fleet, "dead", "purge", "--all")
    assert fleet.app.ledger.find(task.id) is None
    assert "no dead letters" in gpuflow(fleet, "dead")
    assert "or --all" in gpuflow(fleet, "dead", "retry", code=2)


def test_a_retry_goes_to_another_worker_that_serves_its_queue(fleet: TestFleet) -> None:
    fleet.start_worker("w1")
    fleet.start_worker("w2")
    warm = submit(fleet.echo(), app=fleet.app)
    warm.get(timeout=patient(30))
    task = submit(out_of_memory(fleet), app=fleet.app)

    task.wait(timeout=patient(60))

    first, second, third = (entry.worker for entry in task.attempts())
    assert first != second != third


def test_a_url_is_told_of_a_dead_task_also_when_it_answers_late(fleet: TestFleet, receiver: Receiver) -> None:
    fleet.start_worker("w1")
    named = [{"on": ["failed", "dead"], "url": receiver.url, "headers": {"X-Token": "s3"}}]
    dead = submit({**out_of_memory(fleet), "notify": named}, app=fleet.app)
    fine = submit({**fleet.echo(), "notify": named}, app=fleet.app)

    fine.get(timeout=patient(30))
    dead.wait(timeout=patient(30))

    call = eventually(lambda: receiver.calls, within=60)[0]
    assert (call["id"], call["state"], call["token"]) == (dead.id, "DEAD", "s3")
    assert receiver.refused == 1
    assert [call["id"] for call in receiver.calls] == [dead.id]


class OneThatStops:
    """A client of the broker; when the first answer about `worker` was read, that has stopped by itself."""

    def __init__(self, fleet: TestFleet, worker: str) -> None:
        self.client, self.app, self.worker = fleet.broker.client, fleet.app, worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def _then_stop(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **options: Any) -> Any:
            answer = ask(*args, **options)
            Fleet(self.client, self.app.keys).leave(self.worker)
            return answer

        return asked

    def evalsha(self, *args: Any) -> Any:
        return self._then_stop(self.client.evalsha)(*args)

    def pipeline(self, **options: Any) -> Any:
        pipe = self.client.pipeline(**options)
        pipe.execute = self._then_stop(pipe.execute)
        return pipe


def test_a_worker_that_stops_in_that_moment_is_not_called_lost(fleet: TestFleet) -> None:
    entries = Fleet(fleet.broker.client, fleet.app.keys)
    for name in ("gone", "stopped", "there"):
        entries.announce(WorkerEntry(id=name, state=WorkerState.IDLE, timeout_seconds=60.0))
    fleet.broker.client.delete(fleet.app.keys.heartbeat("gone"), fleet.app.keys.heartbeat("stopped"))
    entries.leave("stopped")

    assert entries.note_silent() == ["gone"]

    fleet.broker.client.hset(fleet.app.keys.worker("gone"), "state", "IDLE")
    assert Fleet(OneThatStops(fleet, "gone"), fleet.app.keys).note_silent() == ["gone"]
    stopped = {entry.id: entry.stopped for entry in entries.workers()}
    assert stopped == {"gone": True, "stopped": True, "there": False}


def test_the_reconciler_mends_what_is_lost(fleet: TestFleet) -> None:
    task = submit(fleet.echo(output=1), app=fleet.app)
    queue = task.record().queue
    client, keys = fleet.broker.client, fleet.app.keys
    client.delete(queue)
    client.hset(keys.task(task.id), "updated_at", "1")
    client.sadd(keys.workers, "silent")
    client.hset(keys.worker("silent"), mapping={"id": "silent", "state": "BUSY", "ephemeral": "1"})
    reconciler = Reconciler(fleet.app)

    made = reconciler.run()

    assert made["message_restored"] == 1
    assert made["worker_offline"] == 1
    assert made["worker_forgotten"] == 1
    assert client.llen(queue) == 1
    assert not any(reconciler.run().values()), "a second round finds nothing"
    assert client.hgetall(keys.repairs) == {"message_restored": "1", "worker_offline": "1", "worker_forgotten": "1"}
    fleet.start_worker("w1")
    assert task.get(timeout=patient(30))["output"] == 1


def test_the_reconciler_ends_what_was_cancelled_and_lost_and_nothing_else(fleet: TestFleet) -> None:
    # Given tasks that wait again after their worker was lost, one of which a user had cancelled; nobody can run them
    unwanted, other = (submit(fleet.echo(output=n), app=fleet.app) for n in range(2))
    client, keys = fleet.broker.client, fleet.app.keys
    client.hset(keys.task(unwanted.id), "cancel_requested", "1")

    made = Reconciler(fleet.app).run()

    assert made["cancel_obeyed"] == 1
    assert (unwanted.state, other.state) == ("CANCELLED", "QUEUED")
    assert fleet.app.backend.get_task_meta(unwanted.id, cache=False)["status"] == "REVOKED"
    assert client.llen(other.record().queue) == 1
    assert fleet.app.end_unwanted([unwanted.id, other.id, "nobody"]) == 0


def test_duties_reconcile_a_pipeline_whose_join_never_fired(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1")
    gate = tmp_path / "gate"
    stages = [
        {"name": "a", "spec": {"echo": {"until_exists": str(gate)}}},
        {"name": "b", "spec": {"echo": {"output": 2}}},
    ]
    run = submit_pipeline(
        {
            "apiVersion": "gpuflow/v1",
            "kind": "Pipeline",
            "metadata": {"name": "p"},
            "spec": {"taskType": "echo", "stages": stages},
        },
        app=fleet.app,
    )
    (first,) = eventually(lambda: (stage := run.record().stages.get("a")) and stage.tasks)
    group = fleet.app.AsyncResult(first)
    # The counter of the chord is gone: Celery will never send the join.
    eventually(lambda: fleet.state(first) in ("STARTING", "RUNNING"))
    for key in fleet.broker.client.keys("celery-taskset-meta-*"):
        fleet.broker.client.delete(key)
    assert group.id == first
    gate.touch()
    eventually(lambda: fleet.state(first) == "SUCCEEDED")

    duties = Duties(fleet.app)
    duties.reconcile()

    assert run.wait(timeout=patient(30)).record().state == "SUCCEEDED"


def test_beat_sweeps_and_reconciles_without_any_worker(fleet: TestFleet) -> None:
    task = submit(fleet.echo(), app=fleet.app)
    client, keys = fleet.broker.client, fleet.app.keys
    client.delete(task.record().queue)
    client.hset(keys.task(task.id), "updated_at", "1")
    environment = {
        **leftovers.passed_on(),
        "REDIS_URL": fleet.broker.url,
        "PATH": "/usr/bin:/bin",
        "HOME": str(fleet.folder),
        "GPUFLOW_LEASE_SEC": "2",
    }
    beat = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "gpuflow", "beat", "-l", "INFO"],
        env=environment,
        cwd=fleet.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: client.llen(task.record().queue) == 1, what="the message back in its queue")
        assert client.hget(keys.sweep, "at")
    finally:
        beat.terminate()
        beat.wait(timeout=patient(20))


def test_a_submit_waits_for_the_broker_and_then_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: it refuses every connection, and nobody else can have it
        taken.bind(("127.0.0.1", 0))
        env = {"REDIS_URL": f"redis://127.0.0.1:{taken.getsockname()[1]}/0", "GPUFLOW_SUBMIT_TIMEOUT_SEC": "2"}
        app = GPUFlow("gpuflow", settings=Settings.load(env=env, cwd=tmp_path))

        started = time.monotonic()
        with pytest.raises(BrokerUnavailable, match="cannot be reached"):
            submit({"taskType": "echo"}, app=app)

        assert 2 <= time.monotonic() - started < patient(20)


def test_a_message_of_a_newer_version_is_handed_back(fleet: TestFleet) -> None:
    fleet.start_worker("old")
    task = submit(fleet.echo(output=1), app=fleet.app)
    task.get(timeout=patient(30))
    newer = submit(fleet.echo(output=2, sleep_seconds=0), app=fleet.app, idempotency_key="newer")
    newer.wait(timeout=patient(30))
    # A record that a newer version wrote: the same task, queued again under a schema that is not known here.
    fleet.broker.client.hset(fleet.app.keys.task(newer.id), mapping={"schema": "99", "state": "FAILED"})
    assert newer.retry()

    worker = fleet.workers[0]
    eventually(lambda: "delivery_passed_on" in worker.log())
    # It comes back each second, and is said once, by Celery too.
    returns: set[float] = set()

    def is_back_often() -> bool:
        returns.update(at for _, at in fleet.broker.client.zrange("gpuflow.delayed", 0, -1, withscores=True))
        return len(returns) > 3

    eventually(is_back_often, what="the message to come back")
    assert worker.log().count("delivery_passed_on") == 1
    assert worker.log().count(f"[{newer.id}] received") == 2  # when it ran, and when it first came back
    assert newer.record().attempt == 1
    fleet.broker.client.hset(fleet.app.keys.task(newer.id), "schema", "1")
    eventually(lambda: newer.state == "SUCCEEDED")
    assert newer.record().attempt == 2


@pytest.mark.parametrize(
    ("words", "env", "cause"),
    [
        ((), {"RESULTS_DIR": "/proc/gpuflow"}, "Error: RESULTS_DIR /proc/gpuflow cannot be written: No such file"),
        (("--include", "nobody.has"), {}, "Error: --include nobody.has: No module named 'nobody'; install it"),
    ],
)
def test_what_a_worker_cannot_start_with_is_one_line(
    fleet: TestFleet, words: tuple[str, ...], env: dict[str, str], cause: str
) -> None:
    worker = fleet.spawn_worker("w1", *words, env=env)
    assert worker.process.wait(timeout=patient(30)) == 2
    assert cause in worker.log()
    assert "Traceback" not in worker.log()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_results_folder_that_cannot_be_written_is_a_cause_and_the_worker_lives(fleet: TestFleet, kind: str) -> None:
    fleet.start_worker("w1")
    fine = submit(fleet.echo(), app=fleet.app)
    fine.get(timeout=patient(30))
    task_id = "in-the-way"
    place = fleet.results / task_id
    if kind == "file":
        place.write_text("a file where the folder should be")
    else:
        place.mkdir()
        (place / "attempt-1").write_text("")
    fleet.app.send_task(
        "gpuflow.echo", kwargs={"spec": {**fleet.echo(), "retry": {"max_attempts": 1}}}, task_id=task_id
    )

    record = eventually(lambda: (found := fleet.app.ledger.find(task_id)) and found.state.final and found)

    if kind == "file":
        assert (record.state, record.error["type"]) == ("DEAD", "NotADirectoryError")
    else:
        assert (record.state, record.attempt) == ("SUCCEEDED", 2)
    assert submit(fleet.echo(output=3), app=fleet.app).get(timeout=patient(30))["output"] == 3
