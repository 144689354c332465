"""Retention of results: the decision by table, and the cleaner with folders on disk and a Redis that is played."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gpuflow.broker.keys import Keys
from gpuflow.ledger.states import TaskState
from gpuflow.upkeep.results_cleaning import ResultsCleaner
from gpuflow.upkeep.retention import Listing, RecordView, TaskFolder, Upload, decide

DAY = 86_400.0
NOW = 1_000 * DAY
RETENTION = 30 * DAY


def folder(*attempts_days_ago: float, written_days_ago: float | None = None) -> TaskFolder:
    times = {number: NOW - days * DAY for number, days in enumerate(attempts_days_ago, 1)}
    written = min(attempts_days_ago) if written_days_ago is None else written_days_ago
    return TaskFolder(task_id="t", written_at=NOW - written * DAY, attempts=times)


def record(state: str, *, finished_days_ago: float | None = None, attempt: int = 1, expires: bool = True) -> RecordView:
    finished = None if finished_days_ago is None else NOW - finished_days_ago * DAY
    return RecordView(state=TaskState(state), attempt=attempt, finished_at=finished, expires=expires)


UNFINISHED = [state for state in TaskState if not state.final]


@pytest.mark.parametrize(
    ("seen", "known", "gone"),
    [
        pytest.param(folder(31), None, ["t"], id="old, its record gone"),
        pytest.param(folder(29), None, [], id="its record gone, but written lately"),
        pytest.param(folder(40, 1), None, [], id="its record gone, but one attempt is young"),
        pytest.param(folder(40, written_days_ago=2), None, [], id="its record gone, but the folder is young"),
        pytest.param(folder(31), record("SUCCEEDED", finished_days_ago=31), [], id="old, but Redis still knows it"),
        pytest.param(
            folder(31), record("FAILED", finished_days_ago=31, expires=False), ["t"], id="a record without end"
        ),
        pytest.param(folder(31), record("FAILED", finished_days_ago=29, expires=False), [], id="ended lately"),
        pytest.param(
            folder(5, 4, 3), record("SUCCEEDED", finished_days_ago=2, attempt=3), ["t/attempt-1", "t/attempt-2"],
            id="superseded attempts, two days later",
        ),
        pytest.param(folder(5, 4, 3), record("SUCCEEDED", finished_days_ago=0.9, attempt=3), [], id="not that day"),
        pytest.param(
            folder(5, 0.5, 3), record("SUCCEEDED", finished_days_ago=2, attempt=3), ["t/attempt-1"],
            id="nor one that was written today",
        ),
        pytest.param(
            folder(5, 4, 3), record("SUCCEEDED", finished_days_ago=2, attempt=2), ["t/attempt-1"], id="no later one"
        ),
        pytest.param(folder(9, 8, 7), record("FAILED", finished_days_ago=5, attempt=3), [], id="a retry may need them"),
        *[
            pytest.param(folder(400, 300), record(state, attempt=2, expires=False), [], id=f"unfinished: {state}")
            for state in UNFINISHED
        ],
    ],
)  # fmt: skip
def test_what_goes_of_a_task(seen: TaskFolder, known: RecordView | None, gone: list[str]) -> None:
    listing = Listing(folders=[seen], records={} if known is None else {"t": known})

    assert [one.path for one in decide(listing, now=NOW, retention_seconds=RETENTION)] == gone


def test_nothing_goes_of_what_a_running_pipeline_may_read() -> None:
    known = replace(record("SUCCEEDED", finished_days_ago=400, expires=False), needed=True)
    listing = Listing(folders=[folder(400)], records={"t": known})

    assert decide(listing, now=NOW, retention_seconds=RETENTION) == []


def test_uploads_go_by_age_unless_something_that_runs_names_them() -> None:
    old, young, named = ("a" * 64, "b" * 64, "c" * 64)
    uploads = [
        Upload(sha256=old, written_at=NOW - 31 * DAY),
        Upload(sha256=young, written_at=NOW - DAY),
        Upload(sha256=named, written_at=NOW - 300 * DAY),
    ]

    gone = decide(Listing(uploads=uploads, mentioned={named}), now=NOW, retention_seconds=RETENTION)

    assert [one.path for one in gone] == [f"uploads/{old}"]


class PlayedRedis:
    """The few answers that the cleaner asks for."""

    def __init__(self, records: Mapping[str, Mapping[str, str]] | None = None, *, away: bool = False) -> None:
        self.records = {f"task:{name}": dict(fields) for name, fields in (records or {}).items()}
        self.away = away
        self.queue: list[Any] = []

    def pipeline(self, transaction: bool = True) -> PlayedRedis:
        self.queue = []
        return self

    def hmget(self, key: str, *names: str) -> None:
        self.queue.append([self.records.get(key, {}).get(name) for name in names])

    def ttl(self, key: str) -> None:
        self.queue.append(100 if key in self.records else -2)

    def execute(self) -> list[Any]:
        if self.away:
            raise RedisConnectionError("away")
        return self.queue

    def smembers(self, key: str) -> set[str]:
        return {name.removeprefix("task:") for name in self.records}

    def hget(self, key: str, name: str) -> str | None:
        return self.records[key].get(name)

    def zrange(self, *_: Any) -> list[str]:
        return []


def make(root: Path, name: str, *, days_ago: float = 40, attempt: int = 1) -> Path:
    path = root / name / f"attempt-{attempt}"
    (path / "logs").mkdir(parents=True)
    (path / "logs" / "executor.log").write_text("x")
    (root / name / "logs").symlink_to(f"attempt-{attempt}/logs")
    age(root / name, days_ago)
    return root / name


def age(path: Path, days_ago: float) -> None:
    at = NOW - days_ago * DAY
    for one in [path, *path.rglob("*")]:
        os.utime(one, (at, at), follow_symlinks=False)


def cleaner(root: Path, redis: Any) -> ResultsCleaner:
    return ResultsCleaner(redis, Keys(), root, retention_seconds=RETENTION)


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".gpuflow-cleaning"))


def test_only_folders_of_tasks_go_and_no_link_is_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "results", tmp_path / "outside"
    make(root, "gone")
    make(outside, "elsewhere")
    (root / "link").symlink_to(outside / "elsewhere")
    (root / "gone" / "attempt-1" / "out").symlink_to(outside)
    (root / "dataset").mkdir()
    (root / "dataset" / "rows.jsonl").write_text("{}")
    (root / "linked" / "x").mkdir(parents=True)
    (root / "linked" / "attempt-1").symlink_to(outside / "elsewhere")
    (root / "named").mkdir()
    (root / "named" / "attempt-1").write_text("a file")
    (root / ".hidden" / "attempt-1").mkdir(parents=True)
    for path in root.iterdir():
        if not path.is_symlink():
            age(path, 40)

    removed = cleaner(root, PlayedRedis()).run(now=NOW)

    assert [one.path for one in removed] == ["gone"]
    assert left(root) == [".hidden", "dataset", "link", "linked", "named"]
    assert (outside / "elsewhere" / "attempt-1" / "logs" / "executor.log").exists()


def test_without_an_answer_nothing_goes(tmp_path: Path) -> None:
    make(tmp_path, "old")

    with pytest.raises(RedisConnectionError):
        cleaner(tmp_path, PlayedRedis(away=True)).run(now=NOW)

    assert left(tmp_path) == ["old"]
    assert [one.path for one in cleaner(tmp_path, PlayedRedis()).run(now=NOW, every_seconds=3600)] == ["old"]


def test_a_file_deep_inside_that_is_young_keeps_the_folder(tmp_path: Path) -> None:
    log = make(tmp_path, "old") / "attempt-1" / "logs" / "executor.log"
    os.utime(log, (NOW, NOW))

    assert cleaner(tmp_path, PlayedRedis()).run(now=NOW) == []


def test_a_state_of_a_newer_version_is_not_judged(tmp_path: Path) -> None:
    make(tmp_path, "t")
    known = {"t": {"state": "HIBERNATING", "attempt": "1", "finished_at": "1"}}

    assert cleaner(tmp_path, PlayedRedis(known)).run(now=NOW) == []


def test_tasks_that_run_here_are_spared_whatever_redis_says(tmp_path: Path) -> None:
    make(tmp_path, "t")

    assert cleaner(tmp_path, PlayedRedis()).run(now=NOW, spare=["t"]) == []
    assert left(tmp_path) == ["t"]


def test_those_who_share_a_folder_clean_it_once(tmp_path: Path) -> None:
    make(tmp_path, "a")
    first, second = (cleaner(tmp_path, PlayedRedis()) for _ in range(2))

    assert len(first.run(now=NOW, every_seconds=3600)) == 1
    make(tmp_path, "b")

    assert second.run(now=NOW + 60, every_seconds=3600) == []
    assert len(second.run(now=NOW + 3601, every_seconds=3600)) == 1


def test_a_removal_that_broke_off_is_finished_and_side_files_go_with_the_task(tmp_path: Path) -> None:
    make(tmp_path, "a")
    (tmp_path / ".gpuflow-removed-7-b" / "attempt-1").mkdir(parents=True)
    (tmp_path / ".gpuflow-gateway" / "digests" / "a").mkdir(parents=True)

    cleaner(tmp_path, PlayedRedis()).run(now=NOW)

    assert left(tmp_path) == [".gpuflow-gateway"]
    assert list((tmp_path / ".gpuflow-gateway" / "digests").iterdir()) == []


def test_uploads_of_the_folder(tmp_path: Path) -> None:
    for name in ("a" * 64, "b" * 64, "notes"):
        (tmp_path / "uploads" / name).mkdir(parents=True)
    age(tmp_path / "uploads", 40)
    known = {"t": {"state": "QUEUED", "spec": f'{{"data": {{"sha256": "{"b" * 64}"}}}}'}}

    removed = cleaner(tmp_path, PlayedRedis(known)).run(now=NOW)

    assert [one.path for one in removed] == [f"uploads/{'a' * 64}"]
    assert left(tmp_path / "uploads") == ["b" * 64, "notes"]


def test_an_empty_or_missing_folder_gets_no_file(tmp_path: Path) -> None:
    assert cleaner(tmp_path / "none", PlayedRedis(away=True)).run(now=NOW) == []
    assert cleaner(tmp_path, PlayedRedis(away=True)).run(now=NOW) == []
    assert list(tmp_path.iterdir()) == []
