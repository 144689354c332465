"""What every artifact store must do. Parametrised over the kinds of conftest.py; a new store passes as it is."""

from __future__ import annotations

import hashlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuflow.artifacts.store import Store, check_name, fetch
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
from tests.integration.artifacts.conftest import Place
from tests.integration.artifacts.reading import last_line

MIB = 1 << 20
# The first part of a name is a task's id, in which a results service allows no other characters.
NAMES = [
    "task-1/responses.json",
    "task-1/attempt-1/final_lora.tar.gz",
    "task-1/with spaces and %41 percent+plus",
    "task-1/ünï-코드-✓.bin",
    "task-1/a#hash?query&more=1;x",
    "task-1/~tilde.$(x)'\"",
    "task-1/" + "x/" * 20 + "deep",
    "task-1/" + "n" * 200,
]


def made(path: Path, size: int = 3 * MIB + 17) -> Path:
    """Write a file whose content is the same in no two places."""
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))
        file.write(os.urandom(size % MIB))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made(tmp_path / "source.bin")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A place in a folder of its own, so that all that is left there can be seen."""
    return tmp_path / "fetched" / "target.bin"


# -- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_file_comes_back_by_its_name_and_by_its_url(
    place: Place, store: Store, source: Path, target: Path, name: str
) -> None:
    stored = store.put(source, name)
    fetched = store.get(name, target, sha256=stored.sha256)
    again = fetch(
        stored.url,
        target.with_name("again"),
        settings=Settings(**place.settings),
        token=place.token,
        sha256=stored.sha256,
    )

    assert stored.sha256 == fetched.sha256 == again.sha256 == sha256(source)
    assert stored.size == fetched.size == again.size == source.stat().st_size
    assert stored.name == fetched.name == name
    assert stored.url == fetched.url == store.url(name)
    assert target.read_bytes() == target.with_name("again").read_bytes() == source.read_bytes()
    assert sorted(path.name for path in target.parent.iterdir()) == ["again", "target.bin"]
    assert [file.name for file in store.list("task-1")] == [name]


@pytest.mark.parametrize("size", [0, 1, MIB, 8 * MIB, 33 * MIB + 1])
def test_files_of_all_sizes_come_back(store: Store, tmp_path: Path, target: Path, size: int) -> None:
    source = made(tmp_path / "sized", size)

    stored = store.put(source, "task-1/sized")
    fetched = store.get("task-1/sized", target, sha256=stored.sha256)

    assert stored.size == fetched.size == size
    assert sha256(target) == stored.sha256 == sha256(source)


def test_progress_tells_of_every_byte_once(store: Store, source: Path, target: Path) -> None:
    put: list[int] = []
    got: list[int] = []

    store.put(source, "task-1/a", progress=put.append)
    store.get("task-1/a", target, progress=got.append)

    assert sum(put) == sum(got) == source.stat().st_size
    assert min(put + got) > 0


def test_another_file_of_the_same_name_replaces_the_first(store: Store, tmp_path: Path, target: Path) -> None:
    store.put(made(tmp_path / "one", 1000), "task-1/a")
    store.get("task-1/a", target)
    other = made(tmp_path / "other", 1000)

    stored = store.put(other, "task-1/a")
    store.get("task-1/a", target, sha256=stored.sha256)

    assert target.read_bytes() == other.read_bytes()


def test_what_is_there_already_is_not_sent_again(store: Store, source: Path, target: Path, taken: list[int]) -> None:
    first = store.put(source, "task-1/a")
    sent = sum(taken)
    told: list[int] = []

    again = store.put(source, "task-1/a", progress=told.append)

    assert again == first
    assert sent >= source.stat().st_size
    assert sum(taken) == sent
    assert sum(told) == source.stat().st_size


def test_what_was_fetched_already_is_not_fetched_again(
    store: Store, source: Path, target: Path, taken: list[int]
) -> None:
    stored = store.put(source, "task-1/a")
    store.get("task-1/a", target, sha256=stored.sha256)
    before = sum(taken)

    assert store.get("task-1/a", target, sha256=stored.sha256).sha256 == stored.sha256
    assert sum(taken) == before


# -- names ---------------------------------------------------------------------------------------------------------


def test_a_prefix_is_a_file_or_a_folder_never_a_part_of_a_name(store: Store, tmp_path: Path) -> None:
    source = made(tmp_path / "s", 5)
    for name in ("task-1/a/b", "task-1/a/c/d", "task-1/ab", "task-1/a.json", "task-10/a"):
        store.put(source, name)

    assert [file.name for file in store.list("task-1")] == ["task-1/a.json", "task-1/a/b", "task-1/a/c/d", "task-1/ab"]
    assert [file.name for file in store.list("task-1/a")] == ["task-1/a/b", "task-1/a/c/d"]
    assert [file.name for file in store.list("task-1/a/")] == ["task-1/a/b", "task-1/a/c/d"]
    assert [file.name for file in store.list("task-1/a/c/d")] == ["task-1/a/c/d"]
    assert [file.name for file in store.list("task")] == []
    assert [file.size for file in store.list("task-1")] == [5] * 4
    assert {file.sha256 for file in store.list("task-1")} <= {"", sha256(source)}
    assert [file.url for file in store.list("task-10")] == [store.url("task-10/a")]

    assert store.delete("task-1/a") == 2
    assert store.delete("task-1/a") == 0
    assert store.delete("task-1") == 2
    assert [file.name for file in store.list("task-10")] == ["task-10/a"]
    with pytest.raises(ArtifactError, match="task-1/a/b"):
        store.get("task-1/a/b", tmp_path / "gone")


@pytest.mark.parametrize(
    "name",
    ["", "/", "/etc/passwd", "../x", "a/../b", "a/..", "./a", "a//b", "a/", "a\\b", "a\nb", "a\0b", "a\x7f", "a\x85",
     "a/.gpuflow-x", "n" * 1025, "n" * 256, "é" * 128, "\ud800"],
)  # fmt: skip
def test_hostile_names_are_refused(store: Store, source: Path, target: Path, name: str) -> None:
    for action in (
        lambda: store.put(source, name),
        lambda: store.get(name, target),
        lambda: store.url(name),
        lambda: check_name(name),
    ):
        with pytest.raises(ArtifactError, match="cannot name an artifact") as refused:
            action()
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 300
    for prefix in (name, f"{name}/"):
        if prefix not in ("", "a/"):
            with pytest.raises(ArtifactError):
                store.list(prefix)
            with pytest.raises(ArtifactError):
                store.delete(prefix)
    assert not target.parent.exists()


def test_what_is_not_there_is_told(store: Store, tmp_path: Path, target: Path) -> None:
    assert store.list("task-1/nothing") == []
    assert store.delete("task-1/nothing") == 0
    with pytest.raises(ArtifactError, match="nothing"):
        store.get("task-1/nothing", target)
    with pytest.raises(ArtifactError, match="no-source"):
        store.put(tmp_path / "no-source", "task-1/a")
    with pytest.raises(ArtifactError):
        store.put(tmp_path, "task-1/a-folder")
    assert store.list("task-1") == []
    assert not target.exists()


# -- nothing half, nothing wrong -----------------------------------------------------------------------------------


def test_a_corrupted_byte_is_found(place: Place, store: Store, source: Path, target: Path) -> None:
    stored = store.put(source, "task-1/a")
    spoilt = bytearray(source.read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    place.replace("task-1/a", bytes(spoilt))

    with pytest.raises(ArtifactError, match=r"SHA-256|digest"):
        store.get("task-1/a", target, sha256=stored.sha256)

    assert list(target.parent.glob("*")) == []


def test_a_wrong_digest_leaves_the_file_that_was_there(store: Store, source: Path, target: Path) -> None:
    store.put(source, "task-1/a")
    target.parent.mkdir()
    target.write_text("from before")

    with pytest.raises(ArtifactError):
        store.get("task-1/a", target, sha256="0" * 64)

    assert target.read_text() == "from before"


def killed(place: Place, action: str, path: Path, stop_at: int) -> int:
    """Start a transfer, kill it at `stop_at` bytes, and return how many had gone over."""
    child = place.start(action, "task-1/killed", path, stop_at=stop_at)
    with child:
        told = last_line(child, first=True)
        child.send_signal(signal.SIGKILL)
    return int(told["stopped"])


def test_a_killed_put_leaves_nothing_visible_and_the_next_one_works(
    place: Place, store: Store, tmp_path: Path, target: Path
) -> None:
    source = made(tmp_path / "big", 40 * MIB)

    assert 0 < killed(place, "put", source, 16 * MIB) < source.stat().st_size
    assert store.list("task-1") == []
    with pytest.raises(ArtifactError):
        store.get("task-1/killed", target)

    stored = store.put(source, "task-1/killed")
    assert store.get("task-1/killed", target, sha256=stored.sha256).size == source.stat().st_size
    assert [file.name for file in store.list("task-1")] == ["task-1/killed"]


def test_a_killed_get_leaves_nothing_visible_and_the_next_one_goes_on(
    place: Place, store: Store, tmp_path: Path, target: Path, taken: list[int]
) -> None:
    source = made(tmp_path / "big", 24 * MIB)
    stored = store.put(source, "task-1/killed")

    over = killed(place, "get", target, 12 * MIB)
    assert not target.exists()
    taken.clear()
    told: list[int] = []
    store.get("task-1/killed", target, sha256=stored.sha256, progress=told.append)

    assert 0 < sum(taken) <= source.stat().st_size - over
    assert sum(told) == source.stat().st_size
    assert sha256(target) == stored.sha256
    assert [path.name for path in target.parent.iterdir()] == ["target.bin"]


def test_what_is_left_of_an_older_file_is_not_gone_on_with(
    place: Place, store: Store, tmp_path: Path, target: Path
) -> None:
    store.put(made(tmp_path / "older", 8 * MIB), "task-1/killed")
    killed(place, "get", target, 4 * MIB)
    newer = made(tmp_path / "newer", 8 * MIB)

    store.put(newer, "task-1/killed")
    store.get("task-1/killed", target)

    assert target.read_bytes() == newer.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["target.bin"]


def test_a_full_disk_is_told_and_leaves_nothing(place: Place, store: Store, source: Path, target: Path) -> None:
    store.put(source, "task-1/a")

    with place.start("get", "task-1/a", target, file_limit=MIB) as child:
        told = last_line(child)

    assert "free some space" in told["error"]
    assert list(target.parent.iterdir()) == []


def test_many_at_once_with_one_name_leave_one_whole_file(store: Store, source: Path, target: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        stored = list(pool.map(lambda _: store.put(source, "task-1/a"), range(4)))
        fetched = list(pool.map(lambda _: store.get("task-1/a", target, sha256=stored[0].sha256), range(4)))

    assert {file.sha256 for file in (*stored, *fetched)} == {sha256(source)}
    assert sha256(target) == sha256(source)
    assert [path.name for path in target.parent.iterdir()] == ["target.bin"]
    assert [file.name for file in store.list("task-1")] == ["task-1/a"]
