"""What `gpuflow doctor` says about the lock directory."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuflow.cli import checks_locks
from gpuflow.cli.checks import Check
from gpuflow.settings import Settings


def look(path: Path | str) -> Check:
    [check] = checks_locks.lock_directory(Settings.load(env={"GPUFLOW_LOCK_DIR": str(path)}))
    return check


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the folders of the test for a local disk, whatever the tests run in."""
    monkeypatch.setattr(checks_locks, "file_system", lambda _path: "ext4")


@pytest.mark.usefixtures("on_disk")
def test_a_good_directory(tmp_path: Path) -> None:
    check = look(tmp_path / "locks")
    assert (check.status, check.mend) == ("ok", "")
    assert f"{tmp_path / 'locks'} (ext4): locks hold" in check.detail
    assert look(tmp_path / "locks") == check


def test_without_gpus_and_without_a_setting_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(_visible: None) -> Any:
        return type("Hardware", (), {"gpus": ()})

    monkeypatch.setattr("gpuflow.fleet.hardware.probe", no_gpu)
    assert checks_locks.lock_directory(Settings.load(env={})) == []


@pytest.mark.usefixtures("on_disk")
def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for path in (tmp_path / "link", tmp_path / "open", Path("/proc/no/locks")):
        check = look(path)
        assert check.status == "fail"
        assert "GPUFLOW_LOCK_DIR" in check.mend
        assert str(path) in check.detail


@pytest.mark.parametrize(("kind", "status"), [("nfs4", "fail"), ("fuse.sshfs", "fail"), ("overlay", "warn")])
def test_file_systems_whose_locks_do_not_hold_or_are_seen_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: str
) -> None:
    monkeypatch.setattr(checks_locks, "file_system", lambda _path: kind)
    check = look(tmp_path)
    assert check.status == status
    assert check.mend


@pytest.mark.usefixtures("on_disk")
def test_a_lock_that_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 3))
    check = look(tmp_path)
    assert (check.status, "does not keep another process out" in check.detail) == ("fail", True)


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    inner = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(
        "22 1 0:21 / / rw,relatime shared:1 - overlay overlay rw\n"
        f"23 22 0:22 / {tmp_path} rw - ext4 /dev/sda1 rw\n"
        f"24 23 0:23 / {inner} rw,relatime master:2 propagate_from:1 - nfs4 server:/x rw\n"
        "garbage\n"
    )
    (tmp_path / "a b").mkdir()
    kinds = [
        checks_locks.file_system(path, mounts) for path in (Path("/etc"), tmp_path, tmp_path / "a b", tmp_path / "a")
    ]
    assert kinds == ["overlay", "ext4", "nfs4", "ext4"]
    assert checks_locks.file_system(tmp_path, tmp_path / "none") == "unknown"
    assert checks_locks.file_system(Path("/proc")) == "proc"


def test_workers_of_one_machine_with_two_directories_are_named() -> None:
    def worker(name: str, machine: str, directory: str, path: str) -> tuple[str, dict[str, Any]]:
        return name, {"locks": {"machine": machine, "directory": directory, "path": path}}

    same = [worker("a", "m1", "1:2", "/run/lock/gpuflow"), worker("b", "m1", "1:2", "/run/lock/gpuflow")]
    elsewhere = worker("c", "m2", "7:7", "/run/lock/gpuflow")
    assert checks_locks.shared_by_all([*same, elsewhere, ("old", {}), ("cpu", {"locks": None})]) == []
    [check] = checks_locks.shared_by_all([*same, elsewhere, worker("d", "m1", "1:9", "/run/lock/gpuflow")])
    assert check.status == "fail"
    assert "/run/lock/gpuflow (1:2): a, b; /run/lock/gpuflow (1:9): d" in check.detail
    assert "GPUFLOW_LOCK_DIR" in check.mend


def test_doctor_shows_it(invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLOW_LOCK_DIR", str(tmp_path / "locks"))
    shown = json.loads(invoke("doctor", "--json").stdout)
    assert "lock directory" in {check["name"] for check in shown["checks"]}
    assert os.access(tmp_path / "locks", os.W_OK)
