"""Data that is split over several workers: every row once and in order, whatever is lost, or the stage fails."""

from __future__ import annotations

import itertools
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import submit, submit_pipeline
from gpuflow.errors import InvalidTemplate, TaskFailed
from gpuflow.handles import PipelineRun, Task
from gpuflow.spec.artifact_reference import is_reference
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

#: A lost worker's task is another's after so many seconds.
LEASE = {"GPUFLOW_LEASE_SEC": "4"}
ROWS = [{"number": number, "text": f"row {number}"} for number in range(1000)]
PARALLEL = {"enabled": True, "max_shards": 3}


class Workers:
    """Three workers for one task each; those that a test has killed are replaced."""

    def __init__(self, fleet: TestFleet) -> None:
        self._fleet, self._names = fleet, itertools.count(1)

    def three(self) -> dict[str, WorkerProcess]:
        alive = [one for one in self._fleet.workers if one.process.poll() is None]
        names = [f"w{next(self._names)}" for _ in range(3 - len(alive))]
        fresh = [self._fleet.spawn_worker(name, "--max-jobs", "1", env=LEASE) for name in names]
        return {one.name: one for one in [*alive, *(one.ready() for one in fresh)]}


@pytest.fixture(scope="module")
def workers(long_fleet: TestFleet) -> Workers:
    return Workers(long_fleet)


def running(run: PipelineRun, count: int) -> list[Task]:
    """Return the tasks of the stage `split`, when so many of them run."""

    def found() -> list[Task]:
        tasks = run["split"].tasks
        return tasks if sum(task.state == "RUNNING" for task in tasks) == count else []

    return eventually(found, what=f"{count} running shards")


def stages(data: dict[str, Any], gate: Path | None = None, **spec: Any) -> dict[str, Any]:
    echo = {"until_exists": str(gate)} if gate else {}
    return {"taskType": "echo", "stages": [{"name": "split", "spec": {"data": data, "echo": echo, **spec}}]}


@pytest.mark.parametrize("source", ["inline", "reference", "jsonl"])
def test_of_a_thousand_rows_each_is_there_once_though_a_worker_was_killed(
    long_fleet: TestFleet, workers: Workers, tmp_path: Path, source: str
) -> None:
    # Given a thousand rows on three workers, each of which has its shard
    file, gate = tmp_path / "rows.jsonl", tmp_path / "gate"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    expected: list[Any] = list(ROWS)
    data: dict[str, Any] = {"items": ROWS}
    if source == "reference":
        expected = [{**row, "filler": "x" * 1200} for row in ROWS]
        data = {"items": expected}
    elif source == "jsonl":
        data = {"path": str(file), "columns": {"text": "text"}, "shuffle": True, "seed": 3, "max_items": 999}
        random.Random(3).shuffle(expected)
        expected = [{"text": row["text"]} for row in expected[:999]]
    three = workers.three()
    run = submit_pipeline(stages(data, gate, parallel=PARALLEL), app=long_fleet.app)
    tasks = running(run, 3)
    holders = [task.record().worker for task in tasks]
    assert set(holders) == set(three)
    assert is_reference(tasks[0].record().spec["data"].get("items")) is (source == "reference")

    # When the worker of the second one is killed
    three[str(holders[1])].send(signal.SIGKILL)
    gate.touch()
    run.wait(timeout=patient(90))

    # Then all rows are there, in order, and only what was lost ran again
    result = run["split"].result
    assert [item["output"] for item in result["items"]] == expected
    assert [item["index"] for item in result["items"]] == list(range(len(expected)))
    assert result["usage"] == {"items": len(expected)}
    assert [task.record().attempt for task in tasks] == [1, 2, 1]
    assert tasks[1].record().worker != holders[1]
    seen = [one["shard"] for one in result["results"]]
    assert [(one["index"], one["count"], one["total"]) for one in seen] == [(n, 3, len(expected)) for n in range(3)]
    assert [one["start"] for one in seen] + [len(expected)] == [0] + [one["end"] for one in seen]


@pytest.mark.parametrize(
    ("changed", "says"), [(ROWS[:11], r"shard 0 saw 10 rows, shard 1 .* 11 rows"), (ROWS[10:20], "other rows")]
)
def test_a_file_that_changes_between_its_shards_fails_the_stage(
    fleet: TestFleet, tmp_path: Path, changed: list[Any], says: str
) -> None:
    # Given a worker that takes one shard after the other, and is with the first one
    fleet.start_worker("w1", "--max-jobs", "1")
    file, gate = tmp_path / "rows.jsonl", tmp_path / "gate"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:10]))
    run = submit_pipeline(stages({"path": str(file)}, gate, parallel={"max_shards": 2}), app=fleet.app)
    first, second = running(run, 1)
    eventually(lambda: "shard 0 of 2: rows 0 to 5 of 10" in str(fleet.app.event_log.read(first.id)))
    assert second.state == "QUEUED"

    # When the file becomes another one before the second
    file.write_text("".join(json.dumps(row) + "\n" for row in changed))
    gate.touch()

    # Then the stage fails, and a resume runs both again
    with pytest.raises(TaskFailed, match=says):
        run.wait(timeout=patient(60))
    assert run.resume() == "resumed"
    result = run.wait(timeout=patient(60))["split"].result
    assert [item["output"] for item in result["items"]] == changed


def test_more_shards_than_rows(long_fleet: TestFleet, workers: Workers, tmp_path: Path) -> None:
    workers.three()
    (tmp_path / "rows.csv").write_text("text\na\nb\n")
    data = {"path": str(tmp_path / "rows.csv")}

    run = submit_pipeline(stages(data, resources={"replicas": 4}), app=long_fleet.app).wait(timeout=patient(60))

    result = run["split"].result
    assert [item["output"] for item in result["items"]] == [{"text": "a"}, {"text": "b"}]
    assert [len(one["items"]) for one in result["results"]] == [1, 1, 0, 0]
    folder = long_fleet.results / run["split"].tasks[3].id
    assert json.loads((folder / "responses.json").read_text()) == {"items": []}


def test_one_task_is_not_split_by_submit(long_fleet: TestFleet, workers: Workers) -> None:
    spec = {"taskType": "echo", "data": {"items": ["a", "b"]}, "parallel": PARALLEL}

    with pytest.raises(InvalidTemplate, match="submit_pipeline"):
        submit(spec, app=long_fleet.app)
    with pytest.raises(InvalidTemplate, match="submit_pipeline"):
        long_fleet.app.send_task("gpuflow.echo", kwargs={"spec": spec})
    workers.three()
    (stage,) = submit_pipeline(spec, app=long_fleet.app).wait(timeout=patient(60)).status()["stages"]

    assert len(stage["tasks"]) == 2


def test_the_shipped_example(long_fleet: TestFleet, workers: Workers) -> None:
    workers.three()

    run = submit_pipeline("shards", app=long_fleet.app).wait(timeout=patient(60))

    assert len(run["split"].tasks) == 3
    outputs = [item["output"] for item in run["split"].result["items"]]
    assert sorted(outputs) == ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay"]
    assert run["joined"].result["message"] == f"10 rows, the last one: {outputs[9]}"
