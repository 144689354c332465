"""Demand queues in a running fleet: made, found, served by name from stock Celery, shown, and forgotten."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from gpuflow.upkeep.reconciler import Reconciler
from tests.support.boxes import Box, waits
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """One broker for all tests of this file."""
    made = TestFleet(tmp_path_factory.mktemp("fleet"), options=("--without-mingle",))
    try:
        yield made
    finally:
        made.close()


def command(fleet: TestFleet, *arguments: str) -> Any:
    """Run a command with --json and return what it prints, whatever its exit code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", "from gpuflow.cli import main; main()", *arguments, "--json"],
        cwd=fleet.folder,
        env={**environment, "REDIS_URL": fleet.broker.url, "GPUFLOW_STATE_DIR": str(fleet.folder / "state")},
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def rows(fleet: TestFleet) -> dict[str, Any]:
    return {row["name"]: row for row in command(fleet, "queues")}


def inspected(fleet: TestFleet, worker: str, what: str) -> Any:
    entry = fleet.registry.find(worker)
    assert entry is not None
    return getattr(fleet.app.control.inspect(destination=[entry.node], timeout=patient(20)), what)()[entry.node]


def test_workers_find_queues_made_before_and_after_their_start(gpus: TestFleet) -> None:
    with Box(gpus, "found", "1xA100-40GB") as box:
        before = box.submit("A100:1")
        never = box.submit("H100:1")
        restricted = box.spawn("restricted", "-Q", "gpu-a100,team.queue", "--include", "plain_tasks")
        any_queue = box.spawn("any", "--executors", "command", "--include", "plain_tasks")
        restricted.ready(), any_queue.ready()
        after = box.submit("A100-40GB:1")
        wider = box.submit("40GB:1")
        plain = gpus.app.send_task("plain_tasks.add", args=(1, 2), queue="team.queue")

        assert {task.wait(timeout=patient(30)).worker for task in (before, after)} == {"restricted"}
        assert plain.get(timeout=patient(30)) == 3
        assert waits(never, wider)
        assert box.kinds(wider) == {"any": "no_executor", "restricted": "restricted"}
        shown = rows(gpus)
        assert shown[never.record().queue]["waiting"] == 1
        assert shown[never.record().queue]["workers"] == []
        assert "restricted" in shown[after.record().queue]["workers"]


def test_a_stock_producer_is_served_from_a_demand_queue(gpus: TestFleet) -> None:
    with Box(gpus, "stock", "1xA100-80GB") as box:
        box.start("stock", "--include", "plain_tasks")
        known = box.submit("A100:1")
        assert known.wait(timeout=patient(30)).state == "SUCCEEDED"
        stock = Celery("stock", broker=gpus.broker.url, set_as_current=False)

        sent = [stock.send_task("plain_tasks.environment", args=("HOME",), queue=known.record().queue) for _ in "ab"]

        for result in sent:
            assert gpus.app.AsyncResult(result.id).get(timeout=patient(30)) == os.environ.get("HOME")
        stock.close()


def test_a_stock_producer_may_be_the_first_to_send_to_a_queue_that_a_worker_names(gpus: TestFleet) -> None:
    stock = Celery("stock", broker=gpus.broker.url, set_as_current=False)
    sent = stock.send_task("plain_tasks.add", args=(1, 2), queue="gpu-a100-40g.box=first")
    with Box(gpus, "first", "1xA100-40GB") as box:
        box.start("first", "-Q", "gpu-a100-40g.box=first", "--include", "plain_tasks")

        assert gpus.app.AsyncResult(sent.id).get(timeout=patient(30)) == 3
        sent = stock.send_task("plain_tasks.add", args=(3, 4), queue="gpu-a100-40g.box=first")
        assert gpus.app.AsyncResult(sent.id).get(timeout=patient(30)) == 7
    stock.close()


def test_celery_shows_demand_queues_gpus_labels_and_leases(gpus: TestFleet) -> None:
    with Box(gpus, "shown", "2xA100-80GB") as box:
        box.start("shown")
        task = box.held("A100:1")

        names = {queue["name"] for queue in inspected(gpus, "shown", "active_queues")}
        stats = inspected(gpus, "shown", "stats")["gpuflow"]
        (active,) = inspected(gpus, "shown", "active")

        assert {"gpuflow.control", gpus.settings.task_topic, task.record().queue} <= names
        assert [gpu["name"] for gpu in stats["gpus"]] == ["NVIDIA A100-SXM4-80GB"] * 2
        assert stats["labels"] == {"box": "shown"}
        assert (stats["leases"], stats["running"]) == (1, [task.id])
        assert len(stats["freeGpus"]) == 1
        assert active["id"] == task.id


def test_a_queue_is_forgotten_only_when_nobody_needs_it(gpus: TestFleet) -> None:
    client, keys = gpus.broker.client, gpus.app.keys
    reconciler = Reconciler(gpus.app)
    with Box(gpus, "forgotten", "1xA100-80GB") as box:
        box.start("forgotten")
        used = box.submit("A100:1")
        named = box.held("A100-80GB:1")
        unserved = box.submit("H100:1")
        with_stock = box.submit("A100:1", more={"hardware": {"cpu": 0.1}})
        young = box.submit("A100:1", more={"hardware": {"cpu": 0.2}})
        queues = {
            name: task.record().queue
            for name, task in {
                "used": used,
                "named": named,
                "unserved": unserved,
                "stock": with_stock,
                "young": young,
            }.items()
        }
        assert used.wait(timeout=patient(30)).state == "SUCCEEDED"
        assert with_stock.cancel()
        assert young.cancel()
        client.lpush(
            queues["stock"], '{"a": "message of a stock producer, that nobody can take while the GPU is used"}'
        )

        for name in ("used", "named", "unserved", "stock"):
            client.hset(keys.queue(queues[name]), "used_at", "1")
        assert reconciler.forget_queues() == 1

        left = client.smembers(keys.queues)
        assert queues["used"] not in left
        assert set(queues.values()) - {queues["used"]} <= left
        assert not client.exists(keys.queue(queues["used"]), keys.queue_classes(queues["used"]))
        client.delete(queues["stock"])
        named.cancel()
        assert box.submit("A100:1").wait(timeout=patient(20)).state == "SUCCEEDED", "made again, and served again"


def test_a_draining_worker_takes_nothing_and_says_so(gpus: TestFleet) -> None:
    with Box(gpus, "drained", "1xA100-80GB") as box:
        box.start("drained")
        held = box.held("A100:1")
        queue = held.record().queue
        assert not gpus.registry.serves_beside("drained", queue)
        box.start("other")
        eventually(lambda: gpus.registry.serves_beside("drained", queue), what="the other worker is known to serve it")
        box.workers.pop().close()
        waiting = box.submit("A100:1")

        assert command_text(gpus, "workers", "drain", "drained") == "drained takes nothing new; it runs 1\n"
        eventually(lambda: box.kinds(waiting).get("drained") == "draining", what="explain says so")

        told = "\n".join(box.explained(waiting).to_lines())
        assert "is draining: it ends what it runs and takes nothing new" in told
        assert not gpus.registry.serves_beside("other", queue)
        held.cancel()
        assert box.workers[0].process.wait(timeout=patient(30)) == 0
        assert waits(waiting)


def test_a_worker_that_is_ordered_to_drain_is_not_counted_on_before_it_has_heard_of_it(gpus: TestFleet) -> None:
    with Box(gpus, "ordered", "1xA100-80GB") as box:
        box.start("ordered")
        queue = box.held("A100:1").record().queue
        eventually(lambda: gpus.registry.serves_beside("another", queue), what="it is known to serve the queue")
        box.workers[0].send(signal.SIGSTOP)
        try:
            gpus.registry.ask_to_drain("ordered", None)

            assert not gpus.registry.serves_beside("another", queue)
        finally:
            box.workers[0].send(signal.SIGCONT)


def test_who_waits_for_a_drained_worker_hears_that_it_went_without_a_word(gpus: TestFleet) -> None:
    with Box(gpus, "gone", "1xA100-80GB") as box:
        box.start("gone", HEARTBEAT_INTERVAL_SEC="0.5", HEARTBEAT_TIMEOUT_SEC="2")
        box.held("A100:1")
        with command_started(gpus, "workers", "drain", "gone", "--wait") as waiting:
            assert waiting.stdout is not None and waiting.stderr is not None
            assert waiting.stdout.readline() == "gone takes nothing new; it runs 1\n"
            with frozen(box):
                assert waiting.wait(timeout=patient(30)) == 1
            assert "gone has gone: last heard of" in waiting.stderr.read()


def test_who_waits_for_a_silent_worker_waits_until_its_deadline(gpus: TestFleet) -> None:
    with Box(gpus, "silent", "1xA100-80GB") as box:
        box.start("silent", HEARTBEAT_INTERVAL_SEC="0.5", HEARTBEAT_TIMEOUT_SEC="300")
        with frozen(box), command_started(gpus, "workers", "drain", "silent", "--wait", "--deadline", "1s") as waiting:
            assert waiting.stderr is not None
            assert waiting.wait(timeout=patient(30)) == 1
            assert "silent is silent: last heard of" in waiting.stderr.read()
        assert box.workers[0].process.wait(timeout=patient(30)) == 0


def test_what_waits_for_its_time_is_counted_though_it_is_in_no_queue_yet(gpus: TestFleet) -> None:
    gpus.broker.client.delete(gpus.app.keys.delayed, gpus.app.keys.parked)
    gpus.app.send_task("plain_tasks.add", args=(1, 2), queue="later", countdown=600)
    with command_started(gpus, "queues") as running:
        _, told = running.communicate()
    gpus.broker.client.delete(gpus.app.keys.delayed, gpus.app.keys.parked)
    assert "1 more waits for its time: the next attempt, an ETA, or a worker of a newer version" in told


@contextlib.contextmanager
def frozen(box: Box) -> Iterator[None]:
    box.workers[0].send(signal.SIGSTOP)
    try:
        yield
    finally:
        box.workers[0].send(signal.SIGCONT)


def command_started(fleet: TestFleet, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "REDIS_URL": fleet.broker.url}
    argv = [sys.executable, "-c", "from gpuflow.cli import main; main()", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=fleet.folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def command_text(fleet: TestFleet, *arguments: str) -> str:
    with command_started(fleet, *arguments) as running:
        told, error = running.communicate()
    assert running.returncode == 0, error
    return told


def test_doctor_reports_workers_of_one_machine_with_different_lock_directories(gpus: TestFleet) -> None:
    with Box(gpus, "same", "1xA100-80GB") as same, Box(gpus, "apart", "1xA100-80GB") as apart:
        for worker in (same.spawn("same-1"), same.spawn("same-2"), apart.spawn("apart-1")):
            worker.ready()

        (found,) = [
            check for check in command(gpus, "doctor")["checks"] if "different lock directories" in check["detail"]
        ]

        assert found["status"] == "fail"
        assert "same-1, same-2" in found["detail"]
        assert "apart-1" in found["detail"]
        assert "GPUFLOW_LOCK_DIR" in found["mend"]


def test_a_queue_of_a_new_name_reaches_an_idle_worker_by_the_doorbell(gpus: TestFleet) -> None:
    with Box(gpus, "bell", "1xA100-80GB") as box:
        box.start("bell")
        for part in range(1, 6):
            task = running_or_done(box.submit("A100:1", more={"hardware": {"cpu": part / 1000}}))
            assert task.wait(timeout=patient(20)).worker == "bell"


def running_or_done(task: Any) -> Any:
    eventually(lambda: task.state != "QUEUED", what="it is taken")
    return task
