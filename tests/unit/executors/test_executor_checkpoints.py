"""Checkpoint folders: a crash at any moment leaves whole ones, or folders that nobody reads."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from unittest import mock

import pytest

from executors.base import ExecutorError
from executors.checkpoints import to_resume
from gpuflow.checkpoints import mark_complete, remove_old
from gpuflow.protocol import CHECKPOINT_MARKER, complete_checkpoints

FILES = {"model.bin", "optimizer.bin"}


class Crash(BaseException):
    """The process ends here."""


class _Disk:
    """Lets so many changes of the disk happen; then the process is dead, and so are its `finally` blocks."""

    def __init__(self, lives: int) -> None:
        self.lives = lives

    def __call__(self, real):
        def call(*args, **kwargs):
            if self.lives <= 0:
                raise Crash
            self.lives -= 1
            return real(*args, **kwargs)

        return call

    def patched(self):
        names = ("fsync", "replace", "unlink", "rmdir")
        return mock.patch.multiple(os, **{name: self(getattr(os, name)) for name in names})


def write(parent: Path, step: int) -> Path:
    folder = parent / f"checkpoint-{step}"
    (folder / "inner").mkdir(parents=True)
    for name in (*FILES, "inner/rng.bin"):
        (folder / name).write_bytes(b"data")
    return folder


def steps(parent: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(parent)]


def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    outcomes = set()
    for lives in itertools.count():
        parent = tmp_path / str(lives)
        mark_complete(write(parent, 1), step=1, max_steps=9)
        try:
            second = write(parent, 2)
            with _Disk(lives).patched():
                mark_complete(second, step=2, max_steps=9)
                remove_old(parent, keep=1)
        except Crash:
            ended = False
        else:
            ended = True
        found = complete_checkpoints(parent)
        assert found, lives
        for path in found:
            assert {entry.name for entry in path.iterdir()} >= FILES | {"inner", CHECKPOINT_MARKER}
            assert (path / "inner" / "rng.bin").is_file()
        assert to_resume(str(parent)).path == found[-1]
        outcomes.add(tuple(steps(parent)))
        if ended:
            break

    assert outcomes == {("checkpoint-1",), ("checkpoint-1", "checkpoint-2"), ("checkpoint-2",)}
    assert not (parent / "checkpoint-1").exists()


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(1, None, [5]), (2, None, [4, 5]), (9, None, [1, 2, 3, 4, 5]), (1, 2, [2, 5]), (3, 2, [2, 4, 5]), (1, 5, [5])],
)
def test_the_newest_and_the_best_are_kept(tmp_path, keep, best, left):
    for step in range(1, 6):
        mark_complete(write(tmp_path, step), step=step, max_steps=9)
    half = write(tmp_path, 6)

    remove_old(tmp_path, keep=keep, best=f"{tmp_path}/checkpoint-{best}" if best else None)

    assert steps(tmp_path) == [f"checkpoint-{step}" for step in left]
    assert half.is_dir()


def test_resumes_from_a_checkpoint_or_from_the_newest_of_a_folder(tmp_path):
    first = write(tmp_path, 4)
    mark_complete(first, step=4, max_steps=10)
    mark_complete(write(tmp_path, 10), step=10, max_steps=10)

    one, newest = to_resume(str(first)), to_resume(str(tmp_path))

    assert (one.path, one.step, one.finished) == (first, 4, False)
    assert (newest.step, newest.max_steps, newest.finished) == (10, 10, True)
    assert to_resume(None) is None


def test_nothing_to_resume_from_is_told_and_may_be_tried_again(tmp_path):
    write(tmp_path, 4)
    for folder in (tmp_path, tmp_path / "checkpoint-4", tmp_path / "absent"):
        with pytest.raises(ExecutorError, match="holds no complete checkpoint") as error:
            to_resume(str(folder))
        assert (error.value.type, error.value.retryable) == ("CheckpointMissing", True)


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"step": "x", "max_steps": 1})])
def test_a_broken_marker_is_told(tmp_path, text):
    folder = write(tmp_path, 4)
    (folder / CHECKPOINT_MARKER).write_text(text)

    with pytest.raises(ExecutorError, match="cannot be read"):
        to_resume(str(folder))


@pytest.mark.parametrize(("other", "left"), [("attempt-3", [1, 2]), ("attempt-1", [2]), ("attempt-x", [2])])
def test_an_attempt_that_has_a_successor_removes_nothing_it_may_have_chosen(tmp_path, other, left):
    folder = tmp_path / "attempt-2" / "checkpoints"
    (tmp_path / other).mkdir()
    for step in (1, 2):
        mark_complete(write(folder, step), step=step, max_steps=9)

    remove_old(folder, keep=1)

    assert steps(folder) == [f"checkpoint-{step}" for step in left]
