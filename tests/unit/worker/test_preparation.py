"""Which checkpoint an attempt goes on from: the newest one, of this machine or of the task's store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuflow.artifacts.checkpoint_store import CheckpointUnreachable, drop_checkpoints, upload_checkpoint
from gpuflow.artifacts.local_store import LocalStore
from gpuflow.artifacts.throttle import Throttle
from gpuflow.errors import ArtifactError
from gpuflow.protocol import CHECKPOINT_MARKER
from gpuflow.worker.outcome import cause_of
from gpuflow.worker.preparation import _resume_from
from gpuflow.worker.results_folder import ResultsFolder

TASK = "task-1"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", throttle=Throttle(None))


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    return ResultsFolder(tmp_path / "results", TASK)


def save(parent: Path, step: int) -> Path:
    path = parent / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.bin").write_bytes(f"weights {step}".encode())
    (path / CHECKPOINT_MARKER).write_text(f'{{"step": {step}}}')
    return path


class Broken:
    """A store that fails in one method, after something has happened."""

    def __init__(self, store: LocalStore, method: str, before: Any = None) -> None:
        self._store, self._method, self._before = store, method, before

    def __getattr__(self, name: str) -> Any:
        if name != self._method:
            return getattr(self._store, name)
        if self._before is not None:
            self._before()

        def fail(*_: Any, **__: Any) -> Any:
            raise ArtifactError("the store is away")

        return fail


@pytest.mark.parametrize(
    ("here", "stored", "chosen"),
    [
        ([], [], None),
        ([(1, 10)], [], "attempt-1/checkpoints/checkpoint-10"),
        ([], [(1, 10)], "fetched/1-checkpoint-10"),
        ([(1, 10)], [(1, 10)], "attempt-1/checkpoints/checkpoint-10"),
        ([(1, 20)], [(1, 10)], "attempt-1/checkpoints/checkpoint-20"),
        ([(1, 10)], [(1, 20)], "fetched/1-checkpoint-20"),
        ([(1, 90)], [(2, 20)], "fetched/2-checkpoint-20"),
        ([(2, 20)], [(1, 90)], "attempt-2/checkpoints/checkpoint-20"),
        ([], [(3, 90)], None),
    ],
)
def test_the_newest_counts_wherever_it_is(folder, store, tmp_path, here, stored, chosen):
    for attempt, step in here:
        save(folder.checkpoint_dir(attempt), step)
    for attempt, step in stored:
        upload_checkpoint(store, save(tmp_path / f"away-{attempt}", step), TASK, attempt)

    found = _resume_from(folder, store, TASK, 3)

    assert found == (folder.root / chosen if chosen else None)
    if found is not None:
        assert (found / "model.bin").read_bytes() == f"weights {chosen.rpartition('-')[2]}".encode()


def test_without_a_store_the_one_that_is_here_counts(folder):
    path = save(folder.checkpoint_dir(1), 10)

    assert _resume_from(folder, None, TASK, 2) == path


def test_what_was_fetched_is_used_again_and_nothing_else_is_kept(folder, store, tmp_path):
    upload_checkpoint(store, save(tmp_path, 10), TASK, 1)
    first = _resume_from(folder, store, TASK, 2)
    (first / "here").write_text("not fetched again")
    assert (_resume_from(folder, store, TASK, 3) / "here").exists()

    upload_checkpoint(store, save(tmp_path, 20), TASK, 2)
    second = _resume_from(folder, store, TASK, 3)

    assert [path.name for path in folder.fetched_dir.iterdir()] == [second.name] == ["2-checkpoint-20"]
    assert folder.next_attempt() == 1, "what is fetched is no attempt"
    folder.forget_fetched()
    assert not folder.fetched_dir.exists()


@pytest.mark.parametrize("method", ["list", "get"])
def test_a_store_that_is_away_is_a_failure_that_is_tried_again(folder, store, tmp_path, method):
    save(folder.checkpoint_dir(1), 10)
    upload_checkpoint(store, save(tmp_path, 20), TASK, 1)

    with pytest.raises(CheckpointUnreachable, match="cannot be fetched: the store is away") as error:
        _resume_from(folder, Broken(store, method), TASK, 2)

    assert cause_of(error.value)["retryable"] is True
    assert cause_of(error.value)["type"] == "CheckpointUnreachable"


def test_one_that_the_store_no_longer_has_is_passed_over(folder, store, tmp_path):
    path = save(folder.checkpoint_dir(1), 10)
    upload_checkpoint(store, save(tmp_path, 20), TASK, 1)

    assert _resume_from(folder, Broken(store, "get", lambda: drop_checkpoints(store, TASK)), TASK, 2) == path
