"""Files of a request are taken out of a folder into which a container goes on to write."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.containers import files
from executors.containers.files import SharedFolder
from gpuflow.protocol import RESULT_FILE


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedFolder]:
    (tmp_path / "shared").mkdir()
    folder = SharedFolder(tmp_path / "shared")
    (folder.path / "sub" / "empty").mkdir(parents=True)
    (folder.path / "a.txt").write_text("one")
    (folder.path / "sub" / "b.sh").write_text("two")
    (folder.path / "sub" / "b.sh").chmod(0o700)
    (folder.path / RESULT_FILE).write_text("{}")
    yield folder
    folder.close()
    assert not folder.path.is_dir() or folder.path.is_symlink()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_files_and_folders_come_and_are_copies(shared: SharedFolder, tmp_path: Path) -> None:
    ours = tmp_path / "ours"

    with (shared.path / "a.txt").open("a") as still_open:
        assert shared.bring(ours) == []
        still_open.write(" and more")

    assert names(ours) == ["a.txt", "sub", "sub/b.sh", "sub/empty"]
    assert (ours / "a.txt").read_text() == "one"
    assert os.access(ours / "sub" / "b.sh", os.X_OK)


def test_what_is_no_file_is_named_and_left_out(
    shared: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared.path / "link").symlink_to("/etc/passwd")
    (shared.path / "sub" / "folder").symlink_to("/etc")
    os.mkfifo(shared.path / "pipe")
    monkeypatch.chdir(shared.path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        left_out = shared.bring(tmp_path / "ours")

    assert sorted(left_out) == ["link", "pipe", "socket", "sub/folder"]
    assert names(tmp_path / "ours") == ["a.txt", "sub", "sub/b.sh", "sub/empty"]


def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(
    shared: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "b.sh").write_text("not yours")
    copied, sub = files._copied, shared.path / "sub"

    def swap(name: str, folder: int, target: Path) -> bool:
        if not sub.is_symlink():
            sub.rename(tmp_path / "was")
            sub.symlink_to(secret)
        return copied(name, folder, target)

    monkeypatch.setattr(files, "_copied", swap)

    shared.bring(tmp_path / "ours")

    assert "not yours" not in [path.read_text() for path in (tmp_path / "ours").rglob("*") if path.is_file()]


def test_a_link_in_place_of_the_folder_itself_leads_nowhere(shared: SharedFolder, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / RESULT_FILE).write_text('"not yours"')
    shared.path.rename(tmp_path / "was")
    shared.path.symlink_to(secret)

    assert shared.bring(tmp_path / "ours") == []
    assert names(tmp_path / "ours") == ["a.txt", "sub", "sub/b.sh", "sub/empty"]
    assert (shared.to_read / RESULT_FILE).read_text() == "{}"
    shared.close()
    assert (secret / RESULT_FILE).is_file()
    shared.close = lambda: None  # type: ignore[method-assign]
