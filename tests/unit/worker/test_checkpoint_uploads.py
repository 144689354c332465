"""The uploads of an attempt's checkpoints: the newest goes out, trouble is told, and the end is bounded."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpuflow.artifacts.checkpoint_store import newest_stored
from gpuflow.artifacts.destination import is_at
from gpuflow.artifacts.local_store import LocalStore
from gpuflow.artifacts.throttle import Throttle
from gpuflow.errors import ArtifactError
from gpuflow.protocol import CHECKPOINT_MARKER
from gpuflow.worker import checkpoint_uploads
from gpuflow.worker.checkpoint_uploads import CheckpointUploads
from tests.support.waiting import eventually

TASK = "task-1"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", throttle=Throttle(None))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look but those that are asked for, and no pause between tries."""
    monkeypatch.setattr(checkpoint_uploads, "LOOK_SECONDS", 60.0)
    monkeypatch.setattr(checkpoint_uploads, "LAST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def begin(store: LocalStore, tmp_path: Path) -> Iterator[Callable[..., CheckpointUploads]]:
    started: list[CheckpointUploads] = []

    def start(into: Any = store, **options: Any) -> CheckpointUploads:
        options = {"within": tmp_path, "task_id": TASK, "attempt": 1, "wanted": lambda: True, **options}
        started.append(CheckpointUploads(into, tmp_path / "checkpoints", **options))
        started[-1].start()
        return started[-1]

    yield start
    for uploads in started:
        uploads.finish(upload=False)
        assert not uploads.is_alive()


def save(tmp_path: Path, step: int, *, complete: bool = True) -> Path:
    folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"weights")
    if complete:
        (folder / CHECKPOINT_MARKER).write_text(f'{{"step": {step}}}')
    return folder


def step(store: Any) -> int | None:
    found = newest_stored(store, TASK, below=9)
    return None if found is None else found.step


def steps(store: LocalStore) -> set[str]:
    return {file.name.split("/")[3] for file in store.list(TASK) if file.name.endswith(CHECKPOINT_MARKER)}


class Slow:
    """A store whose files wait at a gate, block by block; what fails, fails with `error`."""

    def __init__(self, store: LocalStore) -> None:
        self.store, self.entered, self.gate = store, threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.names: list[str] = []

    def put(self, source: Path, name: str, *, progress: Any = None) -> Any:
        self.names.append(name)
        self.entered.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return self.store.put(source, name, progress=progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_each_new_checkpoint_is_stored_and_two_are_kept(begin, store, tmp_path):
    told: list[str] = []
    uploads = begin(tell=told.append)
    for number in (10, 20, 30):
        save(tmp_path, number)
        uploads.look()
        eventually(lambda wanted=number: step(store) == wanted and len(told) == wanted / 10)
    save(tmp_path, 40, complete=False)

    uploads.finish(upload=True)

    assert steps(store) == {"checkpoint-20", "checkpoint-30"}
    assert told[0] == "checkpoint-10 is stored: another machine can go on from it"
    assert uploads.begun


def test_older_ones_are_skipped_where_there_is_a_newer_one(begin, store, tmp_path):
    slow = Slow(store)
    uploads = begin(slow)
    save(tmp_path, 10)
    uploads.look()
    assert slow.entered.wait(30)
    for number in (20, 30):
        save(tmp_path, number)

    slow.gate.set()
    uploads.finish(upload=True)

    assert {name.split("/")[3].partition(".")[0] for name in slow.names} == {"checkpoint-10", "checkpoint-30"}


def test_the_last_one_is_stored_though_nobody_has_told_of_it(begin, store, tmp_path):
    uploads = begin()
    save(tmp_path, 10)

    uploads.finish(upload=True)

    assert step(store) == 10


def test_a_completed_attempt_stores_no_more(begin, store, tmp_path):
    uploads = begin()
    save(tmp_path, 10)

    uploads.finish(upload=False)

    assert step(store) is None
    assert not uploads.begun


def remove(folder: Path) -> None:
    (folder / CHECKPOINT_MARKER).unlink()
    shutil.rmtree(folder)


def test_a_checkpoint_that_the_trainer_removes_meanwhile_is_stored_all_the_same(begin, store, tmp_path):
    slow = Slow(store)
    uploads = begin(slow)
    first = save(tmp_path, 10)
    uploads.look()
    assert slow.entered.wait(30)
    remove(first)

    slow.gate.set()
    uploads.finish(upload=True)

    assert steps(store) == {"checkpoint-10"}
    assert list((tmp_path / "checkpoints").iterdir()) == [], "nothing is left of it here"


def test_on_a_disk_without_hard_links_it_is_copied(begin, store, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.ENOTSUP, "no links")))
    told: list[str] = []
    slow = Slow(store)
    uploads = begin(slow, tell=told.append)
    first = save(tmp_path, 10)
    uploads.look()
    assert slow.entered.wait(30)
    save(tmp_path, 20)
    remove(first)

    slow.gate.set()
    uploads.finish(upload=True)

    assert steps(store) == {"checkpoint-10", "checkpoint-20"}
    assert told == [f"checkpoint-{step} is stored: another machine can go on from it" for step in (10, 20)]


def test_a_failure_is_told_and_tried_again(begin, store, tmp_path):
    told: list[str] = []
    slow = Slow(store)
    slow.gate.set()
    slow.error = ArtifactError("the store is away")
    uploads = begin(slow, tell=told.append)
    save(tmp_path, 10)
    uploads.look()
    eventually(lambda: told)
    assert told == ["checkpoint-10: not stored yet, it is tried again: the store is away"]
    assert step(store) is None

    slow.error = None
    uploads.finish(upload=True)

    assert step(store) == 10


def test_the_last_upload_is_given_up_after_some_tries(begin, store, tmp_path):
    told: list[str] = []
    slow = Slow(store)
    slow.gate.set()
    slow.error = ArtifactError("the store is away")
    uploads = begin(slow, tell=told.append)
    save(tmp_path, 10)

    uploads.finish(upload=True)

    assert len(told) == checkpoint_uploads.LAST_TRIES


def test_an_attempt_that_is_lost_stores_nothing_more(begin, store, tmp_path):
    slow, ours = Slow(store), threading.Event()
    ours.set()
    uploads = begin(slow, wanted=ours.is_set)
    save(tmp_path, 10)
    uploads.look()
    assert slow.entered.wait(30)
    save(tmp_path, 20)

    ours.clear()
    slow.gate.set()
    uploads.finish(upload=True)

    assert steps(store) == set()
    assert {name.split("/")[3] for name in slow.names} == {"checkpoint-10"}


def test_the_last_upload_ends_with_the_time_of_the_notice(begin, store, tmp_path):
    slow = Slow(store)
    uploads = begin(slow, end_by=lambda: 0.0)
    save(tmp_path, 10)
    uploads.look()
    assert slow.entered.wait(30)

    uploads.finish(upload=True)

    assert uploads.is_alive(), "it waits for the store"
    slow.gate.set()
    eventually(lambda: not uploads.is_alive())
    assert steps(store) == set()


def test_a_store_that_is_the_results_folder_is_known(store, tmp_path):
    name = f"{TASK}/attempt-1/checkpoints"
    (tmp_path / "link").symlink_to(tmp_path / "store")

    assert is_at(store, name, tmp_path / "link" / name)
    assert not is_at(store, name, tmp_path / "results" / name)
    assert not is_at(Mock(url=lambda name: f"s3://bucket/{name}"), name, tmp_path)
