"""What functions tell and ask by `gpuflow.context`, in children and in threads of real workers."""

from __future__ import annotations

import json
import signal
import sys
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from celery import chain

from gpuflow.errors import InvalidTemplate, TaskCancelled
from gpuflow.handles import Task
from tests.support.boxes import Box
from tests.support.bubblewrap import need_bubblewrap
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

INCLUDE = ("--include", "team_context")
#: Notice and lease are short where a worker ends.
ENDING = {"GPUFLOW_LEASE_SEC": "3", "GPUFLOW_GRACE_SEC": "20"}


def send(fleet: TestFleet, name: str, *args: Any, **options: Any) -> Any:
    return fleet.app.send_task(f"team_context.{name}", args=args, **options)


@pytest.fixture(scope="module")
def served(long_fleet: TestFleet) -> TestFleet:
    """A fleet with a worker that no test ends."""
    long_fleet.start_worker("w1", *INCLUDE, env={"GPUFLOW_GRACE_SEC": "20"})
    return long_fleet


def test_progress_and_log_are_seen_where_those_of_executors_are(served: TestFleet, tmp_path: Path) -> None:
    until = tmp_path / "go"
    sent = send(served, "tells", str(until))

    eventually(lambda: sent.state == "PROGRESS", what="the state")
    progress = eventually(lambda: Task(sent.id, served.app).status()["progress"], what="the progress of the record")
    assert (progress["current"], progress["total"], progress["metrics"]) == (3, 60, {"loss": 1.25})
    assert sent.info["message"] == "warming up" and sent.info["attempt"] == 1
    until.touch()
    assert sent.get(timeout=patient(30)) == "done"
    events = [(event.name, dict(event.data)) for event in Task(sent.id, served.app).events()]
    assert ("log", {"message": 'a line of its own rows=7 name="two words"', "stream": "stderr"}) in events
    assert [data["unit"] for name, data in events if name == "progress"] == ["step"]
    log = served.results / sent.id / "attempt-1" / "logs" / "executor.log"
    assert "a line of its own" in log.read_text()


def test_an_artifact_is_in_the_manifest_and_read_by_another_task(served: TestFleet, tmp_path: Path) -> None:
    outside = tmp_path / "data"
    outside.write_text("of elsewhere")
    makes, reads = (served.app.signature(f"team_context.{name}") for name in ("makes", "reads"))

    sent = chain(makes.clone((str(outside),)), reads).apply_async()

    assert sent.get(timeout=patient(30)) == ["of its own", "of elsewhere", '{"rows": [1, 2]}']
    manifest = json.loads((served.results / sent.parent.id / "attempt-1" / "manifest.json").read_text())
    listed = {entry["name"]: entry for entry in manifest["artifacts"]}
    references = [one["$artifact"] for one in sent.parent.get()]
    for name, one in zip(("own.txt", "copied/data.bin", "table.json"), references, strict=True):
        assert (listed[name]["sha256"], listed[name]["bytes"]) == (one["sha256"], one["bytes"])


@pytest.mark.parametrize("name", ["../up.txt", "a/../../up.txt", "checkpoints/x", "manifest.json", ".hidden"])
def test_a_name_that_leaves_the_folder_or_is_the_workers_is_refused(served: TestFleet, name: str) -> None:
    with pytest.raises(Exception, match=r"leads out of the output folder|keeps that name"):
        send(served, "leaves", name).get(timeout=patient(30))


def test_a_cancelled_function_that_asks_cleans_up_and_is_cancelled(served: TestFleet, tmp_path: Path) -> None:
    sent = send(served, "cleans_up", str(tmp_path))
    eventually((tmp_path / "begun").exists, what="a function that runs")

    served.app.cancel_task(sent.id)

    with pytest.raises(TaskCancelled):
        sent.get(timeout=patient(30))
    assert served.state(sent.id) == "CANCELLED" and (tmp_path / "cleaned").exists()


def test_stopped_without_a_word_of_the_worker_is_a_failure(served: TestFleet) -> None:
    with pytest.raises(Exception, match=r"nobody asked.*should_stop\(\) says no"):
        send(served, "leaves_unasked").get(timeout=patient(30))


def test_a_task_in_a_thread_tells_and_asks_too(served: TestFleet, tmp_path: Path) -> None:
    until = tmp_path / "go"
    sent, other = (send(served, "in_thread", str(until)) for _ in range(2))

    for one in (sent, other):
        eventually(lambda one=one: one.state == "PROGRESS", what="the state")
        assert (one.info["current"], one.info["total"], one.info["unit"]) == (50.0, 100, "%")
    until.touch()
    told = [one.get(timeout=patient(30)) for one in (sent, other)]
    assert [one["task_id"] for one in told] == [sent.id, other.id]
    folder = str(served.results / sent.id / "attempt-1")
    expected = {"task_id": sent.id, "attempt": 1, "gpus": [], "stop": False, "read": "in a thread", "folder": folder}
    assert told[0] == expected


def test_models_are_arguments_and_results(served: TestFleet) -> None:
    for name in ("doubled", "doubled_in_thread"):
        assert send(served, name, {"x": 4}).get(timeout=patient(30)) == {"doubled": 8}
        sent = send(served, name, {"x": "no", "y": 1})
        with pytest.raises(InvalidTemplate, match=r"argument request\.x: .*integer.*; argument request\.y: Extra"):
            sent.get(timeout=patient(30))
        assert sent.state == "FAILURE"


def test_arguments_that_are_not_valid_are_not_tried_again(served: TestFleet) -> None:
    sent = send(served, "doubled", {})  # of a function that is retried whatever it raises

    with pytest.raises(InvalidTemplate, match="Field required"):
        sent.get(timeout=patient(30))

    assert served.app.ledger.get(sent.id).attempt == 1


def test_a_result_that_the_next_task_does_not_take_fails_that_one(served: TestFleet) -> None:
    """The worker sends what follows: that cannot be refused there without a failure of what has succeeded."""
    makes, doubled = (served.app.signature(f"team_context.{name}") for name in ("tells_nothing", "doubled_in_thread"))

    sent = chain(makes.clone(()), doubled).apply_async()

    with pytest.raises(InvalidTemplate, match="argument request"):
        sent.get(timeout=patient(30))
    assert sent.parent.get(timeout=patient(30)) == "nothing"


def test_large_arguments_go_by_the_store(served: TestFleet) -> None:
    @served.app.task(name="team_context.measures", child=True, shared=False)
    def measures(text: str, *, day: date) -> None: ...

    served.app.finalize()
    size = 3 << 20
    before = served.broker.client.info("memory")["used_memory_dataset"]

    sent = measures.delay("x" * size, day=date(2026, 3, 1))

    assert sent.get(timeout=patient(30)) == [size, "2026-03-01", size]
    assert served.broker.client.info("memory")["used_memory_dataset"] - before < size
    record = served.app.ledger.get(sent.id)
    reference = record.spec["function"]["arguments"]["$artifact"]
    assert reference["bytes"] > size and "/uploads/" in reference["url"] and record.attempt == 2


def test_gpus_are_those_of_the_claim(fleet: TestFleet) -> None:
    with Box(fleet, "two", "2xA100-80GB") as box:
        box.start("two", *INCLUDE)

        sent = send(fleet, "about", resources="A100:1")
        told = sent.get(timeout=patient(30))

    assert told["gpus"] == told["visible"] and len(told["gpus"]) == 1 and told["gpus"][0].startswith("GPU-")
    assert (told["attempt"], told["task_id"], told["resume_from"]) == (1, sent.id, None)


def at_its_last_step(fleet: TestFleet, sent: Any) -> None:
    def step() -> Any:
        record = fleet.app.ledger.find(sent.id)
        return record and (record.progress or {}).get("current")

    eventually(lambda: step() == 3, what="its third step")


def test_a_function_that_is_told_to_stop_saves_and_goes_on_elsewhere(fleet: TestFleet, tmp_path: Path) -> None:
    first = fleet.start_worker("w1", *INCLUDE, env=ENDING)
    sent = send(fleet, "works", 4, str(tmp_path / "never"))
    at_its_last_step(fleet, sent)
    fleet.start_worker("w2", *INCLUDE, env=ENDING)

    drain(first)

    told = sent.get(timeout=patient(60))
    assert told == {"began": 3, "step": 4, "attempt": 2, "stop": False}
    (entry,) = [one for one in fleet.app.ledger.attempts(sent.id) if one.attempt == 1]
    assert entry.outcome == "preempted"
    assert first.process.wait(timeout=patient(30)) == 0


def drain(worker: WorkerProcess) -> None:
    """Have a worker hand back what runs: the second SIGTERM says so."""
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log(), what="a worker that drains")
    worker.send(signal.SIGTERM)


def test_after_a_kill_the_next_attempt_goes_on_from_the_newest_checkpoint(fleet: TestFleet, tmp_path: Path) -> None:
    first = fleet.start_worker("w1", *INCLUDE, env=ENDING)
    sent = send(fleet, "works", 4, str(tmp_path / "never"))
    at_its_last_step(fleet, sent)

    first.send(signal.SIGKILL)

    fleet.start_worker("w2", *INCLUDE, env=ENDING)
    assert sent.get(timeout=patient(60)) == {"began": 3, "step": 4, "attempt": 2, "stop": False}
    kept = [path.name for path in (fleet.results / sent.id / "attempt-1" / "checkpoints").iterdir()]
    assert sorted(kept) == ["checkpoint-2", "checkpoint-3"]


def test_an_isolated_function_tells_saves_and_makes_files(fleet: TestFleet, tmp_path: Path) -> None:
    need_bubblewrap()
    fleet.start_worker("w1", *INCLUDE, env={"GPUFLOW_ISOLATE": "bubblewrap"})

    assert send(fleet, "works", 3, "/").get(timeout=patient(30)) == {"began": 0, "step": 3, "attempt": 1, "stop": False}
    reference = send(fleet, "leaves", "a/b.txt").get(timeout=patient(30))
    assert Path(unquote(urlsplit(reference["$artifact"]["url"]).path)).read_text() == "x"


@pytest.mark.parametrize("name", ["thread_that_leaves", "merged_that_leaves"])
def test_a_task_in_a_thread_that_is_told_to_stop_goes_back_to_its_queue(
    fleet: TestFleet, tmp_path: Path, name: str
) -> None:
    first = fleet.start_worker("w1", *INCLUDE, env=ENDING)

    @fleet.app.task(name="team_context.merged_that_leaves", merge=True, shared=False)
    def merged_that_leaves(folder: str) -> None: ...

    fleet.app.finalize()
    sent = send(fleet, name, str(tmp_path))
    eventually((tmp_path / "begun").exists, what="a task that runs")
    fleet.start_worker("w2", *INCLUDE, env=ENDING)

    drain(first)

    assert sent.get(timeout=patient(60)) == "again"
