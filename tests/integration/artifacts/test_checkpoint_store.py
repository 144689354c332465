"""Checkpoints in a store: whole ones or none, whatever dies or disappears meanwhile."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpuflow.artifacts.checkpoint_store import (
    CheckpointGone,
    StoredCheckpoint,
    drop_checkpoints,
    fetch_checkpoint,
    newest_stored,
    prune_checkpoints,
    upload_checkpoint,
)
from gpuflow.artifacts.store import Store
from gpuflow.errors import ArtifactError
from gpuflow.protocol import CHECKPOINT_MARKER, is_complete

TASK = "task-1"
FILES = {"model.bin": b"weights" * 1000, "empty.bin": b"", "optimizer/rng 0.bin": b"\0\1"}


class Crash(BaseException):
    """The process ends here."""


class Mortal:
    """A store whose process dies at its `lives`-th change; `deletes` counts files, as a store deletes one by one."""

    def __init__(self, store: Store, lives: int) -> None:
        self._store, self.lives = store, lives

    def _live(self) -> None:
        if self.lives <= 0:
            raise Crash
        self.lives -= 1

    def put(self, *args: Any, **options: Any) -> Any:
        self._live()
        return self._store.put(*args, **options)

    def delete(self, prefix: str) -> int:
        files = self._store.list(prefix)
        for file in files:
            self._live()
            self._store.delete(file.name)
        return len(files)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Meddled:
    """A store behind whose back something happens just before the file `name` is put or fetched."""

    def __init__(self, store: Store, name: str, meddle: Any) -> None:
        self._store, self._name, self._meddle = store, name, meddle

    def _at(self, name: str) -> None:
        if name.endswith(self._name) and self._meddle is not None:
            meddle, self._meddle = self._meddle, None
            meddle()

    def put(self, source: Path, name: str, **options: Any) -> Any:
        self._at(name)
        return self._store.put(source, name, **options)

    def get(self, name: str, target: Path, **options: Any) -> Any:
        self._at(name)
        return self._store.get(name, target, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def checkpoint(parent: Path, step: int, marker: str | None = None) -> Path:
    folder = parent / f"checkpoint-{step}"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    text = json.dumps({"step": step, "max_steps": 99}) if marker is None else marker
    (folder / CHECKPOINT_MARKER).write_text(text)
    return folder


def upload(store: Store, parent: Path, step: int, attempt: int = 1, **options: Any) -> Path:
    folder = checkpoint(parent / f"attempt-{attempt}", step, **options)
    upload_checkpoint(store, folder, TASK, attempt)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def newest(store: Store, below: int = 9) -> tuple[int, str, int] | None:
    found = newest_stored(store, TASK, below=below)
    return None if found is None else (found.attempt, found.name, found.step)


def found_in(store: Store) -> StoredCheckpoint:
    found = newest_stored(store, TASK, below=9)
    assert found is not None
    return found


def test_what_is_fetched_is_what_was_uploaded(store: Store, tmp_path: Path) -> None:
    folder = upload(store, tmp_path, 20)

    fetched = fetch_checkpoint(store, found_in(store), tmp_path / "fetched" / "1-checkpoint-20")

    assert is_complete(fetched)
    assert content(fetched) == content(folder)
    assert [path.name for path in fetched.parent.iterdir()] == [fetched.name]


def test_the_latest_attempt_counts_and_then_the_step(store: Store, tmp_path: Path) -> None:
    assert newest(store) is None
    for step in (9, 100, 20):
        upload(store, tmp_path, step)
    upload(store, tmp_path, 50, attempt=2)
    upload(store, tmp_path, 10, attempt=10)

    assert newest(store, below=11) == (10, "checkpoint-10", 10)
    assert newest(store, below=10) == (2, "checkpoint-50", 50)
    assert newest(store, below=2) == (1, "checkpoint-100", 100)
    assert newest(store, below=1) is None


@pytest.mark.parametrize(("text", "step"), [('{"step": 7}', 7), ("", 30), ("[]", 30), ('{"step": "x"}', 30)])
def test_the_marker_tells_the_step_or_else_the_name(local_place: Any, tmp_path: Path, text: str, step: int) -> None:
    store = local_place.open()
    upload(store, tmp_path, 30, marker=text)

    assert newest(store) == (1, "checkpoint-30", step)


def test_a_crash_between_any_two_steps_of_an_upload_shows_the_old_one_or_the_new(
    local_place: Any, tmp_path: Path
) -> None:
    seen = set()
    for lives in itertools.count():
        store = local_place.open()
        drop_checkpoints(store, TASK)
        parent = tmp_path / str(lives)
        old, new = upload(store, parent, 10), checkpoint(parent, 20)
        mortal: Any = Mortal(store, lives)
        try:
            upload_checkpoint(mortal, new, TASK, 1)
            prune_checkpoints(mortal, TASK, 1, keep=1)
        except Crash:
            ended = False
        else:
            ended = True
        found = found_in(store)
        fetched = fetch_checkpoint(store, found, parent / "fetched")
        assert content(fetched) == content(new if found.step == 20 else old), lives
        seen.add(found.step)
        if ended:
            break
    assert seen == {10, 20}
    assert {file.name.split("/")[3] for file in store.list(TASK)} == {"checkpoint-20", "checkpoint-20.files.json"}

    # Whatever an upload has left behind goes with the next one.
    broken: Any = Mortal(store, 2)
    with pytest.raises(Crash):
        upload_checkpoint(broken, checkpoint(tmp_path, 30), TASK, 1)
    upload(store, tmp_path, 40)
    prune_checkpoints(store, TASK, 1)
    assert {file.name.split("/")[3].partition(".")[0] for file in store.list(TASK)} == {
        "checkpoint-20",
        "checkpoint-40",
    }


def test_a_folder_that_is_removed_meanwhile_is_not_seen(store: Store, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 10)

    def remove() -> None:
        (folder / CHECKPOINT_MARKER).unlink()
        shutil.rmtree(folder)

    meddled: Any = Meddled(store, "optimizer/rng 0.bin", remove)
    with pytest.raises(CheckpointGone):
        upload_checkpoint(meddled, folder, TASK, 1)

    assert newest(store) is None
    with pytest.raises(CheckpointGone):
        upload_checkpoint(store, folder, TASK, 1)


def test_one_that_is_deleted_while_it_is_fetched_is_gone_and_nothing_is_left(store: Store, tmp_path: Path) -> None:
    upload(store, tmp_path, 10)
    found, target = found_in(store), tmp_path / "fetched" / "1-checkpoint-10"
    meddled: Any = Meddled(store, "model.bin", lambda: drop_checkpoints(store, TASK))

    with pytest.raises(CheckpointGone):
        fetch_checkpoint(meddled, found, target)

    assert list(target.parent.iterdir()) == []


def test_a_changed_byte_is_found(place: Any, tmp_path: Path) -> None:
    store = place.open()
    upload(store, tmp_path, 10)
    found, target = found_in(store), tmp_path / "fetched" / "1-checkpoint-10"
    place.replace(f"{found.place}/model.bin", b"Weights" * 1000)

    with pytest.raises(ArtifactError, match=r"model\.bin"):
        fetch_checkpoint(store, found, target)

    assert not target.exists()


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/../../evil", ".gpuflow-part", "a\\b"])
def test_a_name_that_leaves_the_folder_is_refused(local_place: Any, tmp_path: Path, name: str) -> None:
    store = local_place.open()
    upload(store, tmp_path, 10)
    found = found_in(store)
    local_place.replace(
        f"{found.place}.files.json", json.dumps({CHECKPOINT_MARKER: {"sha256": ""}, name: {"sha256": ""}}).encode()
    )
    before = set(tmp_path.rglob("*"))

    with pytest.raises(ArtifactError, match="cannot name an artifact"):
        fetch_checkpoint(store, found, tmp_path / "fetched")

    assert set(tmp_path.rglob("*")) == before


def test_a_broken_index_is_told(local_place: Any, tmp_path: Path) -> None:
    store = local_place.open()
    upload(store, tmp_path, 10)
    found = found_in(store)
    local_place.replace(f"{found.place}.files.json", b"[")

    with pytest.raises(ArtifactError, match=r"files\.json cannot be read"):
        fetch_checkpoint(store, found, tmp_path / "fetched")


def test_a_results_folder_may_be_the_store(local_place: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "shared" / TASK / "attempt-1" / "checkpoints", 10)

    fetched = fetch_checkpoint(local_place.open(), found_in(local_place.open()), tmp_path / "fetched")

    assert content(fetched) == content(folder)


def test_a_link_is_not_stored(local_place: Any, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("private")
    folder = checkpoint(tmp_path, 10)
    upload_checkpoint(local_place.open(), folder, TASK, 1)
    (folder / "link").symlink_to(tmp_path / "outside")

    with pytest.raises(ArtifactError, match="is a link"):
        upload_checkpoint(local_place.open(), folder, TASK, 2)

    assert newest(local_place.open()) == (1, "checkpoint-10", 10)


def test_the_newest_two_are_kept_and_in_the_end_none(store: Store, tmp_path: Path) -> None:
    result = tmp_path / "responses.json"
    result.write_text("{}")
    store.put(result, f"{TASK}/attempt-1/responses.json")
    upload(store, tmp_path, 5, attempt=2)
    for step in (10, 20, 100):
        upload(store, tmp_path, step)

    prune_checkpoints(store, TASK, 1)

    kept = {tuple(file.name.split("/")[1:4:2]) for file in store.list(TASK) if file.name.endswith(CHECKPOINT_MARKER)}
    assert kept == {("attempt-1", "checkpoint-20"), ("attempt-1", "checkpoint-100"), ("attempt-2", "checkpoint-5")}
    assert drop_checkpoints(store, TASK) == 3
    assert [file.name for file in store.list(TASK)] == [f"{TASK}/attempt-1/responses.json"]
    assert drop_checkpoints(store, TASK) == 0
