"""The files of an attempt go over a few at once, to every kind of store: all of them and then the manifest, or none."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import boto3
import pytest

from gpuflow.artifacts import s3_store
from gpuflow.artifacts.checkpoint_store import fetch_checkpoint, newest_stored, upload_checkpoint
from gpuflow.artifacts.destination import UploadFailed, upload_attempt
from gpuflow.artifacts.several import MOST_AT_ONCE
from gpuflow.artifacts.store import Store
from gpuflow.errors import ArtifactError
from gpuflow.protocol import CHECKPOINT_MARKER
from tests.integration.artifacts.conftest import Place
from tests.integration.artifacts.test_conformance import MIB, made, sha256

NAMES = [f"model-{number}.safetensors" for number in range(6)]
DEADLINE_SECONDS = 30


class Watched:
    """A store that notes the order of the ends, and does something before a file of that name is put or fetched."""

    def __init__(self, store: Store, before: dict[str, Any] | None = None) -> None:
        self._store, self._before = store, before or {}
        self.ended: list[str] = []

    def _do(self, action: str, *args: Any, name: str, **options: Any) -> Any:
        short = name.rpartition("/")[2]
        self._before.get(short, lambda: None)()
        done = getattr(self._store, action)(*args, **options)
        self.ended.append(short)
        return done

    def put(self, source: Path, name: str, **options: Any) -> Any:
        return self._do("put", source, name, name=name, **options)

    def get(self, name: str, target: Path, **options: Any) -> Any:
        return self._do("get", name, target, name=name, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    folder = tmp_path / "attempt"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        made(folder / name, (number + 1) * MIB + 17)
    (folder / "manifest.json").write_text("{}")
    return folder


def refuse() -> None:
    raise ArtifactError("the third file cannot be stored; try again")


def test_all_files_come_over_and_the_manifest_last(store: Store, attempt: Path) -> None:
    watched: Any = Watched(store)

    upload_attempt(watched, attempt, "task-1", 1, ["manifest.json", *NAMES])

    assert sorted(watched.ended[:-1]) == NAMES
    assert watched.ended[-1] == "manifest.json"
    assert {file.name for file in store.list("task-1")} == {f"task-1/attempt-1/{n}" for n in [*NAMES, "manifest.json"]}
    for name in NAMES:
        stored = store.get(f"task-1/attempt-1/{name}", attempt.parent / "back" / name)
        assert stored.sha256 == sha256(attempt / name)


def test_when_one_fails_there_is_no_manifest_and_the_next_try_sends_the_rest(
    store: Store, attempt: Path, taken: list[int]
) -> None:
    first, others = NAMES[0], threading.Event()
    watched: Any = Watched(store)
    done = watched._do

    def noting(*args: Any, **options: Any) -> Any:
        ended = done(*args, **options)
        if first in watched.ended:
            others.set()
        return ended

    def fail() -> None:
        assert others.wait(DEADLINE_SECONDS)
        refuse()

    watched._do, watched._before = noting, {NAMES[2]: fail}
    with pytest.raises(UploadFailed, match="third file"):
        upload_attempt(watched, attempt, "task-1", 1, NAMES)

    there = {file.name.rpartition("/")[2] for file in store.list("task-1")}
    assert first in there
    assert not there & {NAMES[2], "manifest.json"}
    taken.clear()
    upload_attempt(store, attempt, "task-1", 1, NAMES)
    sizes = {name: (attempt / name).stat().st_size for name in NAMES}
    assert sum(taken) <= sum(size for name, size in sizes.items() if name not in there) + 100
    assert len(store.list("task-1")) == len(NAMES) + 1


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        made(folder / name, MIB // 2 + number)
    (folder / CHECKPOINT_MARKER).write_text(json.dumps({"step": 20}))
    return folder


def test_the_index_of_a_checkpoint_is_the_same_whichever_file_is_there_first(local_place: Any, tmp_path: Path) -> None:
    folder, store = checkpoint(tmp_path / "checkpoint-20"), local_place.open()
    last = threading.Event()
    slow: Any = Watched(store, {NAMES[0]: lambda: last.wait(DEADLINE_SECONDS), NAMES[-1]: last.set})
    indexes = []

    for number, one in enumerate((store, slow), start=1):
        upload_checkpoint(one, folder, "task-1", number)
        index = tmp_path / "shared" / "task-1" / f"attempt-{number}" / "checkpoints" / "checkpoint-20.files.json"
        indexes.append(index.read_bytes())

    assert slow.ended.index(NAMES[0]) >= len(NAMES) - MOST_AT_ONCE  # it did end late
    assert indexes[0] == indexes[1]
    assert list(json.loads(indexes[0])) == [CHECKPOINT_MARKER, *NAMES]


def test_a_checkpoint_of_several_files_comes_back_and_its_progress_is_told_once(store: Store, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-20")
    size = sum(path.stat().st_size for path in folder.iterdir())
    put: list[int] = []
    got: list[int] = []

    upload_checkpoint(store, folder, "task-1", 1, progress=put.append)
    found = newest_stored(store, "task-1", below=9)
    assert found is not None
    watched: Any = Watched(store)
    target = fetch_checkpoint(watched, found, tmp_path / "fetched" / "1-checkpoint-20", progress=got.append)

    assert {path.name: sha256(path) for path in target.iterdir()} == {p.name: sha256(p) for p in folder.iterdir()}
    assert watched.ended[-1] == CHECKPOINT_MARKER
    assert (sum(got), sum(put) > size) == (size, True)  # put tells of the index too


@pytest.mark.parametrize("way", ["put", "get"])
def test_one_that_is_told_to_stop_shows_nothing(store: Store, tmp_path: Path, way: str) -> None:
    folder, target = checkpoint(tmp_path / "checkpoint-20"), tmp_path / "fetched" / "1-checkpoint-20"

    class NotWanted(Exception):
        pass

    def stop(_: int) -> None:
        raise NotWanted

    if way == "put":
        with pytest.raises(NotWanted):
            upload_checkpoint(store, folder, "task-1", 1, progress=stop)
        assert newest_stored(store, "task-1", below=9) is None
    else:
        upload_checkpoint(store, folder, "task-1", 1)
        found = newest_stored(store, "task-1", below=9)
        assert found is not None
        with pytest.raises(NotWanted):
            fetch_checkpoint(store, found, target, progress=stop)
        assert list(target.parent.iterdir()) == []


def test_few_parts_are_in_memory_however_many_large_files_there_are(
    s3_place: Place, attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = s3_store.S3Store(s3_place.url, throttle=s3_store.Throttle(None), part_bytes=5 * MIB)
    for name in NAMES:
        made(attempt / name, 11 * MIB)
    lock, now, most = threading.Lock(), 0, 0
    put_part = s3_store.S3Store._put_part

    def counting(*args: Any) -> Any:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        try:
            return put_part(*args)
        finally:
            with lock:
                now -= 1

    monkeypatch.setattr(s3_store.S3Store, "_put_part", counting)
    upload_attempt(store, attempt, "task-1", 1, NAMES)

    assert 2 <= most <= 4
    assert len(store.list("task-1")) == len(NAMES) + 1
    client = boto3.client("s3")
    assert client.list_multipart_uploads(Bucket=s3_place.url.split("/")[2]).get("Uploads", []) == []
    client.close()
