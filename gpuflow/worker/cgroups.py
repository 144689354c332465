"""Control groups (cgroup v2) of this worker's tasks: memory and CPUs that the kernel holds a whole task to.

A worker may make groups below a folder that is delegated to it: the group that systemd's `Delegate=yes` gives the
service, one that GPUFLOW_CGROUP names, or, as root, one of its own at the top. The shim puts the child into its group
(`worker.shim`); the worker reads what the kernel says of the group at the end, and removes it.

The kernel's interface: https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuflow.errors import GPUFlowError
from gpuflow.logs import get_logger

log = get_logger("gpuflow.cgroups")

#: The group that the worker's own processes move to: a group with processes cannot give controllers to its children.
_OWN_LEAF: Final = "gpuflow-worker"
#: The group that root makes at the top where the worker's own one is shared with other programs.
_TOP: Final = "gpuflow"
_PREFIX: Final = "gpuflow-task-"
#: The period of `cpu.max`, in microseconds, and the least quota that the kernel takes.
_PERIOD_US: Final = 100_000
_LEAST_QUOTA_US: Final = 1_000
#: A group whose processes were killed is empty within this time, or it is left to the next worker.
_EMPTY_SECONDS: Final = 2.0
#: A group that is younger is left: the worker that made it may be about to use it.
_YOUNG_SECONDS: Final = 60.0
_PROBE_SECONDS: Final = 10.0
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


class NoCgroups(GPUFlowError):
    """This worker cannot make control groups; the message says why."""


@dataclass(frozen=True, kw_only=True)
class GroupEnd:
    """What the kernel says of a group at its end.

    `hit_limit`: the group's own limit ended processes; `killed`: processes were ended for memory, by whichever limit.
    """

    memory_mib: int | None = None
    hit_limit: bool = False
    killed: bool = False
    peak_bytes: int | None = None


@dataclass(kw_only=True)
class TaskGroup:
    """The group of one attempt. `end` is there once it is closed."""

    path: Path
    memory_mib: int | None = None
    end: GroupEnd | None = None

    def close(self) -> GroupEnd:
        """Return what the kernel has counted, end what is left in the group, and remove it."""
        events = _pairs(self.path / "memory.events")
        self.end = GroupEnd(
            memory_mib=self.memory_mib,
            hit_limit=events.get("oom", 0) > 0 and events.get("oom_kill", 0) > 0,
            killed=events.get("oom_kill", 0) > 0,
            peak_bytes=_number(self.path / "memory.peak"),
        )
        _remove(self.path)
        return self.end


class Cgroups:
    """Makes the groups of tasks below one folder. Safe to use from several threads."""

    def __init__(self, parent: Path, *, holds_cpu: bool) -> None:
        self.parent = parent
        self.holds_cpu = holds_cpu

    def make(self, name: str, *, memory_mib: int | None, cpus: float | None) -> TaskGroup:
        """Make a group that holds its processes to these amounts. Raises OSError."""
        path = self.parent / f"{_PREFIX}{os.getpid()}-{_UNSAFE.sub('-', name)[:100]}-{secrets.token_hex(4)}"
        path.mkdir()
        try:
            if memory_mib is not None:
                _write(path / "memory.max", str(memory_mib << 20))
                with contextlib.suppress(OSError):  # a kernel without swap accounting
                    _write(path / "memory.swap.max", "0")
                with contextlib.suppress(OSError):  # Linux before 4.19
                    _write(path / "memory.oom.group", "1")
            if cpus is not None and self.holds_cpu:
                _write(path / "cpu.max", f"{max(_LEAST_QUOTA_US, round(cpus * _PERIOD_US))} {_PERIOD_US}")
        except OSError:
            _remove(path)
            raise
        return TaskGroup(path=path, memory_mib=memory_mib)

    def remove_left(self) -> None:
        """Remove the empty groups that workers have left which are gone.

        Workers of other containers may share the folder, whose processes have no ids here: nothing is ended, and what
        is young may be about to be joined.
        """
        for path in self.parent.glob(f"{_PREFIX}*"):
            pid = path.name.removeprefix(_PREFIX).partition("-")[0]
            is_there = pid.isdecimal() and pid != str(os.getpid()) and Path("/proc", pid).exists()
            with contextlib.suppress(OSError):
                is_young = time.time() - path.stat().st_mtime < _YOUNG_SECONDS
                if not is_there and not is_young and not _pairs(path / "cgroup.events").get("populated"):
                    _remove(path, end=False)

    def probe(self) -> None:
        """Find out whether a process can be put into a group. Raises NoCgroups."""
        group = self.make("probe", memory_mib=None, cpus=None)
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", 'echo $$ > "$0"', str(group.path / "cgroup.procs")],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise NoCgroups(f"no process can be put into {group.path}: {error}") from None
        finally:
            _remove(group.path)
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().rpartition(": ")[2]
            raise NoCgroups(
                f"no process can be put into a group of {self.parent} ({why}); the worker's user has to be able to "
                "write cgroup.procs of the folder that this group and the worker's own have in common"
            )


def find_cgroups(
    given: Path | None, *, proc: Path = Path("/proc"), is_root: bool | None = None, pid: int | None = None
) -> Cgroups:
    """Return what makes groups on this machine. Raises NoCgroups with the reason.

    `given` is a folder that is delegated to this worker, as GPUFLOW_CGROUP names it. Without one the worker's own group
    is used; the worker moves into a group below it where it has to.
    """
    if given is not None:
        parent = given
        _enable(parent)
    else:
        parent = _own_parent(proc, os.geteuid() == 0 if is_root is None else is_root, pid or os.getpid())
    cgroups = Cgroups(parent, holds_cpu="cpu" in _words(parent / "cgroup.subtree_control"))
    cgroups.remove_left()
    cgroups.probe()
    return cgroups


def _own_parent(proc: Path, is_root: bool, pid: int) -> Path:
    mount = _mount(proc)
    own = _own_group(proc, mount)
    base = own.parent if own.name == _OWN_LEAF else own
    if not os.access(base / "cgroup.subtree_control", os.W_OK) or not os.access(base, os.W_OK):
        raise NoCgroups(
            f"{base} is not delegated to the worker's user; set Delegate=yes in its systemd unit, or GPUFLOW_CGROUP"
        )
    try:
        _enable(base)
    except OSError:
        pass  # there are processes in it: our own, we hope
    else:
        return base
    leaf = base / _OWN_LEAF
    try:
        leaf.mkdir(exist_ok=True)
        _write(leaf / "cgroup.procs", str(pid))
        _enable(base)
    except OSError as error:
        with contextlib.suppress(OSError):
            _write(base / "cgroup.procs", str(pid))
            leaf.rmdir()
        if not is_root:
            raise NoCgroups(
                f"{base} has other processes than this worker ({error.strerror}); start it in a group of its own"
            ) from None
    else:
        return base
    top = mount / _TOP
    try:
        _enable(mount)
        top.mkdir(exist_ok=True)
        _enable(top)
    except OSError as error:
        raise NoCgroups(f"{top} cannot be made: {error.strerror or error}") from None
    return top


def _mount(proc: Path) -> Path:
    for line in _text(proc / "self" / "mounts").splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[2] == "cgroup2":
            return Path(fields[1])
    raise NoCgroups("this machine has no cgroup v2")


def _own_group(proc: Path, mount: Path) -> Path:
    for line in _text(proc / "self" / "cgroup").splitlines():
        if line.startswith("0::"):
            name = line[3:].strip("/")
            path = mount / name if name else mount
            if not path.is_dir():
                raise NoCgroups(f"the worker's own group {line[3:]} is not visible in {mount}")
            return path
    raise NoCgroups("the worker is in no group of cgroup v2")


def _enable(parent: Path) -> None:
    """Have `parent` give its children the controllers. Raises NoCgroups, OSError."""
    if "memory" not in _words(parent / "cgroup.controllers"):
        raise NoCgroups(f"{parent} has no memory controller: another cgroup (v1) has it, or its parent keeps it")
    control = parent / "cgroup.subtree_control"
    if "memory" not in _words(control):
        _write(control, "+memory")
    if "cpu" in _words(parent / "cgroup.controllers") and "cpu" not in _words(control):
        with contextlib.suppress(OSError):
            _write(control, "+cpu")


def _remove(path: Path, *, end: bool = True) -> None:
    """Remove a group; with `end`, what is left in it is ended."""
    until = time.monotonic() + _EMPTY_SECONDS
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # no kernel's folder: there it is EBUSY, and the files go with it
                shutil.rmtree(path, ignore_errors=True)
                return
            if not end:
                return
            if time.monotonic() > until:
                log.warning("cgroup_not_removed", group=str(path), cause=error.strerror)
                return
        with contextlib.suppress(OSError):
            if _pairs(path / "cgroup.events").get("populated"):
                _write(path / "cgroup.kill", "1")
        for folder, _, _ in os.walk(path, topdown=False):  # a task of the worker's user may make groups of its own
            if folder != str(path):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
        time.sleep(0.01)


def _write(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _pairs(path: Path) -> dict[str, int]:
    """Return the counters of a file of lines `name number`."""
    found = {}
    for line in _text(path).splitlines():
        name, _, number = line.partition(" ")
        if number.strip().isdecimal():
            found[name] = int(number)
    return found
