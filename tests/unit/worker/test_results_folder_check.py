"""A worker that cannot write results does not start; one whose disk is full does, and says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpuflow.errors import GPUFlowError
from gpuflow.worker.results_folder import check_writable


def test_it_is_made(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_its_place_is_a_cause(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(GPUFlowError, match=r"cannot be written: (File exists|Not a directory)"):
            check_writable(folder)


@pytest.mark.parametrize("flag", [0, os.ST_RDONLY])
def test_no_rights_and_a_disk_without_writes_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int
) -> None:
    state = os.statvfs(tmp_path)
    parts = [*state[:8], flag, *state[9:]]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(parts))
    with pytest.raises(GPUFlowError) as raised:
        check_writable(tmp_path)
    assert ("Read-only file system" if flag else "Permission denied") in str(raised.value)
    assert "ReadWritePaths= of the unit" in str(raised.value)


def test_a_full_disk_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    check_writable(tmp_path / "new")
