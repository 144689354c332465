"""What only a folder can meet with: links, folders in the way, a disk that fills up while a file comes in."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpuflow.artifacts.store import fetch, open_store
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
from tests.integration.artifacts.conftest import Place
from tests.integration.artifacts.reading import last_line


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(b"x" * 3_000_000)
    return tmp_path / "source"


def test_a_link_out_of_the_folder_is_not_followed(local_place: Place, root: Path, source: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    (root / "door").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    store = local_place.open()

    for name in ("door/secret", "file"):
        with pytest.raises(ArtifactError, match="by a link"):
            store.get(name, tmp_path / "got")
        with pytest.raises(ArtifactError, match="by a link"):
            store.put(source, name)
    assert store.list("") == []
    assert store.delete("") == 0
    assert (outside / "secret").read_text() == "s"


def test_a_full_disk_leaves_nothing_half_stored(local_place: Place, root: Path, source: Path) -> None:
    with local_place.start("put", "task/a", source, file_limit=1_000_000) as child:
        told = last_line(child)

    assert "task/a cannot be stored" in told["error"]
    assert "free some space" in told["error"]
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_a_file_in_the_way_of_a_folder_is_told(local_place: Place, source: Path) -> None:
    store = local_place.open()
    store.put(source, "a")

    with pytest.raises(ArtifactError, match="a/b cannot be stored"):
        store.put(source, "a/b")
    store.delete("")
    store.put(source, "a/b")
    with pytest.raises(ArtifactError, match="a cannot be stored"):
        store.put(source, "a")
    assert [file.name for file in store.list("")] == ["a/b"]


def test_deleting_leaves_no_empty_folders(local_place: Place, root: Path, source: Path) -> None:
    store = local_place.open()
    store.put(source, "a/b/c")

    assert store.delete("a/b") == 1
    assert list(root.iterdir()) == []


def test_what_cannot_be_read_is_told_and_not_left_out(
    local_place: Place, root: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local_place.open()
    store.put(source, "a/b")

    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ArtifactError, match="cannot be listed: Permission denied; give this user the right"):
        store.list("a")


def test_a_file_may_be_put_where_it_lies(local_place: Place, root: Path, source: Path) -> None:
    store = local_place.open()
    stored = store.put(source, "a")

    assert store.put(root / "a", "a") == stored


def test_a_pipe_is_no_source(local_place: Place, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ArtifactError, match="no plain file"):
        local_place.open().put(tmp_path / "pipe", "a")
    with pytest.raises(ArtifactError, match="no plain file"):
        fetch((tmp_path / "pipe").as_uri(), tmp_path / "got", settings=Settings())


@pytest.mark.parametrize(
    "url", ["file://otherhost/a", "file:relative", "ftp://host/a", "/a/path", "file:///a%00b", "s3://", "s3:///key"]
)
def test_urls_that_name_no_store_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="use "):
        open_store(url, settings=Settings())


def test_a_refused_url_does_not_tell_its_secrets(tmp_path: Path) -> None:
    for url in ("ftp://user:canary@host/a?sig=canary#canary", "s3://canary:canary@bucket/a?x=canary"):
        with pytest.raises(ArtifactError) as refused:
            fetch(url, tmp_path / "got", settings=Settings())
        assert "canary" not in str(refused.value)
