"""Where a worker may make control groups, what it writes there, and what it reads at the end: on folders of files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from gpuflow.routing.requirement import Requirement
from gpuflow.settings import Settings
from gpuflow.worker.cgroups import Cgroups, GroupEnd, NoCgroups, find_cgroups
from gpuflow.worker.child import ChildEnd
from gpuflow.worker.outcome import failed
from gpuflow.worker.task_limits import TaskLimits, limits_of


def group(path: Path, *, controllers: str = "cpu memory pids", on: str = "") -> Path:
    """Make a folder with the files of a group."""
    path.mkdir(parents=True, exist_ok=True)
    for name, text in {"cgroup.controllers": controllers, "cgroup.subtree_control": on, "cgroup.procs": ""}.items():
        (path / name).write_text(text)
    return path


def machine(tmp_path: Path, own: str) -> tuple[Path, Path]:
    """Make a machine whose worker is in the group `own`; return its /proc and the top of its groups."""
    mount, proc = group(tmp_path / "cgroup"), tmp_path / "proc"
    group(mount / own)
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "mounts").write_text(f"tmpfs /run tmpfs rw 0 0\ncgroup2 {mount} cgroup2 rw 0 0\n")
    (proc / "self" / "cgroup").write_text(f"3:cpu:/x\n0::/{own}\n")
    return proc, mount


def test_a_delegated_group_is_used_and_given_controllers(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, "system.slice/gpuflow-worker.service")
    found = find_cgroups(None, proc=proc, is_root=False)
    assert found.parent == mount / "system.slice/gpuflow-worker.service"
    assert (found.parent / "cgroup.subtree_control").read_text() == "+cpu"  # a file keeps the last write only


def test_a_worker_that_was_put_into_the_leaf_uses_the_group_above(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, "service/gpuflow-worker")
    group(mount / "service", on="cpu memory")
    found = find_cgroups(None, proc=proc, is_root=False)
    assert (found.parent, found.holds_cpu) == (mount / "service", True)


def test_a_group_with_processes_is_left_for_a_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, mount = machine(tmp_path, "service")
    import gpuflow.worker.cgroups as module

    real, leaf = module._write, mount / "service" / "gpuflow-worker"

    def write(path: Path, text: str) -> None:
        if path == mount / "service" / "cgroup.subtree_control" and not (leaf / "cgroup.procs").exists():
            raise OSError(16, "Device or resource busy")
        real(path, text)

    monkeypatch.setattr(module, "_write", write)
    assert find_cgroups(None, proc=proc, is_root=False, pid=4711).parent == mount / "service"
    assert (leaf / "cgroup.procs").read_text() == "4711"


@pytest.mark.parametrize("is_root", [True, False])
def test_a_group_that_is_shared_with_others_goes_to_root_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_root: bool
) -> None:
    proc, mount = machine(tmp_path, "session.scope")
    group(mount / "gpuflow", on="memory")
    import gpuflow.worker.cgroups as module

    real = module._write

    def write(path: Path, text: str) -> None:
        if path == mount / "session.scope" / "cgroup.subtree_control":
            raise OSError(16, "Device or resource busy")
        real(path, text)

    monkeypatch.setattr(module, "_write", write)
    if is_root:
        found = find_cgroups(None, proc=proc, is_root=True, pid=4711)
        assert found.parent == mount / "gpuflow"
    else:
        with pytest.raises(NoCgroups, match="other processes than this worker"):
            find_cgroups(None, proc=proc, is_root=False, pid=4711)
    assert (mount / "session.scope" / "cgroup.procs").read_text() == "4711"  # it is back where it was


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("v1", "has no memory controller"),
        ("no mount", "no cgroup v2"),
        ("hidden", "is not visible"),
        ("none", "in no group"),
    ],
)
def test_what_is_in_the_way_is_named(tmp_path: Path, change: str, why: str) -> None:
    proc, mount = machine(tmp_path, "x")
    if change == "v1":
        (mount / "x" / "cgroup.controllers").write_text("hugetlb")
    elif change == "no mount":
        (proc / "self" / "mounts").write_text("tmpfs /run tmpfs rw 0 0\n")
    else:
        (proc / "self" / "cgroup").write_text("0::/gone\n" if change == "hidden" else "3:cpu:/\n")
    with pytest.raises(NoCgroups, match=why):
        find_cgroups(None, proc=proc, is_root=False)


def test_a_task_is_held_and_its_end_is_read(tmp_path: Path) -> None:
    parent = group(tmp_path / "g", on="memory cpu")
    made = Cgroups(parent, holds_cpu=True).make("task/../1.2", memory_mib=512, cpus=1.5)
    assert made.path.parent == parent
    assert re.fullmatch(rf"gpuflow-task-{os.getpid()}-task-..-1\.2-[0-9a-f]{{8}}", made.path.name)
    assert Cgroups(parent, holds_cpu=True).make("task/../1.2", memory_mib=1, cpus=None).path != made.path
    assert (made.path / "memory.max").read_text() == str(512 << 20)
    assert (made.path / "memory.swap.max").read_text() == "0"
    assert (made.path / "memory.oom.group").read_text() == "1"
    assert (made.path / "cpu.max").read_text() == "150000 100000"
    (made.path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 3\noom_group_kill 1\n")
    (made.path / "memory.peak").write_text(f"{512 << 20}\n")
    assert made.close() == GroupEnd(memory_mib=512, hit_limit=True, killed=True, peak_bytes=512 << 20)
    assert not made.path.exists()


def test_what_a_dead_worker_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    parent = group(tmp_path / "g", on="memory")
    names = {
        "dead": "gpuflow-task-999999999-t.1",
        "predecessor": f"gpuflow-task-{os.getpid()}-t.1",  # in a container every worker has the same id
        "young": "gpuflow-task-999999998-t.1",
        "populated": "gpuflow-task-999999997-t.1",  # of another container, whose processes have no ids here
        "living": f"gpuflow-task-{os.getppid()}-t.1",
        "other": "other",
    }
    for name, folder in names.items():
        (parent / folder).mkdir()
        if name == "populated":
            (parent / folder / "cgroup.events").write_text("populated 1\nfrozen 0\n")
        if name != "young":
            os.utime(parent / folder, (0, 0))
    find_cgroups(parent)
    assert {name for name, folder in names.items() if not (parent / folder).exists()} == {"dead", "predecessor"}
    assert not (parent / names["populated"] / "cgroup.kill").exists(), "its tasks were ended"


def test_a_folder_whose_groups_take_no_process_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = group(tmp_path / "g", on="memory")
    made: list[Path] = []
    real = Path.mkdir

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        real(path, *args, **kwargs)
        if path.parent == parent:
            made.append(path)
            real(path / "cgroup.procs")  # cannot be written to

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(NoCgroups, match="no process can be put into a group"):
        find_cgroups(parent)
    assert made and not made[0].exists()


def test_an_attempt_goes_on_without_a_group_that_cannot_be_made_unless_it_must_have_one(tmp_path: Path) -> None:
    gone = Cgroups(tmp_path / "gone", holds_cpu=True)
    plan = TaskLimits(by="cgroup", cgroups=gone).plan(ASKED)
    plan.begin("t.1")
    told = plan.report()["limits"]
    assert (told["by"], told["enforced"]) == ("none", {}) and "no cgroup" in told["why"]
    with pytest.raises(FileNotFoundError):
        TaskLimits(by="cgroup", cgroups=gone, is_strict=True).plan(ASKED).begin("t.1")


@pytest.mark.parametrize(
    ("events", "retryable", "text"),
    [
        (GroupEnd(memory_mib=512, hit_limit=True, killed=True), False, "more than the 512 MiB of memory that it asks"),
        (GroupEnd(memory_mib=512, killed=True), True, "the machine, or the worker's service, was out of memory"),
        (GroupEnd(killed=True), True, "the machine, or the worker's service, was out of memory"),
    ],
)
def test_an_end_by_the_kernel_is_told_as_out_of_memory(events: GroupEnd, retryable: bool, text: str) -> None:
    error = failed({}, ChildEnd(exit_code=None, signal=9, group=events))
    assert (error["type"], error["retryable"]) == ("OutOfMemory", retryable)
    assert text in error["message"]
    other = failed({}, ChildEnd(exit_code=None, signal=9, group=GroupEnd(memory_mib=512)))
    assert other["type"] == "ChildKilled"


ASKED = Requirement(memory_mib=512, cpu=2)


def grouped(*, cpu: bool) -> TaskLimits:
    return TaskLimits(by="cgroup", cgroups=Cgroups(Path("/x"), holds_cpu=cpu))


@pytest.mark.parametrize(
    ("limits", "runner", "by", "enforced", "why"),
    [
        (grouped(cpu=True), "child", "cgroup", {"memoryMib", "cpus"}, ""),
        (grouped(cpu=False), "child", "cgroup", {"memoryMib"}, "no cpu"),
        (grouped(cpu=True), "session", "none", set(), "warm session"),
        (TaskLimits(by="none", why="no cgroup: x"), "child", "none", set(), "no cgroup: x"),
        (TaskLimits(by="none", why="no cgroup: x"), "container", "container", {"memoryMib", "cpus"}, ""),
        (TaskLimits(by="address-space"), "child", "address-space", {"memoryMib"}, "memory only"),
    ],
)  # fmt: skip
def test_what_is_declared_and_what_is_enforced(
    limits: TaskLimits, runner: str, by: str, enforced: set[str], why: str
) -> None:
    told = limits.plan(ASKED, runner, {"memoryMib": 256, "cpus": 2}).report()["limits"]  # type: ignore[arg-type]
    assert told["declared"] == {"memoryMib": 512, "cpus": 2}
    assert (told["by"], set(told["enforced"])) == (by, enforced)
    assert why in told.get("why", "")
    assert (not why) is ("why" not in told)


def test_nothing_is_told_of_a_task_that_declares_nothing() -> None:
    limits = TaskLimits(by="cgroup", cgroups=Cgroups(Path("/nowhere"), holds_cpu=True))
    plan = limits.plan(Requirement())
    plan.begin("t.1")
    assert (plan.report(), plan.group, plan.resource_limits) == ({}, None, {})


@pytest.mark.parametrize("mode", ["auto", "cgroup", "address-space", "none"])
def test_the_setting_chooses_and_a_folder_that_is_no_group_is_refused(tmp_path: Path, mode: str) -> None:
    settings = Settings.load(env={"GPUFLOW_TASK_LIMITS": mode, "GPUFLOW_CGROUP": str(tmp_path)}, cwd=tmp_path)
    if mode == "cgroup":
        with pytest.raises(Exception, match="GPUFLOW_TASK_LIMITS is cgroup, and this worker has no cgroup: "):
            limits_of(settings)
        return
    found = limits_of(settings)
    assert found.by == {"auto": "none", "address-space": "address-space", "none": "none"}[mode]
    assert ("no memory controller" in found.why) is (mode != "none")
    group(tmp_path, on="memory")
    assert limits_of(settings).by == ("none" if mode == "none" else "cgroup")
