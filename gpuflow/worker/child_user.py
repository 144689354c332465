"""The user as whom the children of tasks run (GPUFLOW_CHILD_USER), and the folders that belong to it.

A worker that runs as root gives its rights up for what a task brings: the shim stays root, so that it can end all of
the child's processes, and changes the user before the child's program begins (`worker.shim`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings

_SEARCH: Final = 0o011
_CHECK_SECONDS: Final = 60.0
#: The number of the system call setgroups(2), by machine (arch/*/entry/syscalls in Linux).
_SETGROUPS: Final[Mapping[str, int]] = {
    "x86_64": 116, "aarch64": 159, "riscv64": 159, "loongarch64": 159, "ppc64le": 81, "s390x": 206,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChildUser:
    """A user of this machine."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def variables(self) -> dict[str, str]:
        """Return the variables that say who a process is."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def own(self, path: Path) -> None:
        """Give this user what lies at `path`, links themselves and not what they lead to. Raises OSError."""
        for _, folders, files, descriptor in os.fwalk(path, follow_symlinks=False):
            for name in (*folders, *files, "."):
                self._give(name, descriptor)

    def _give(self, name: str, folder: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid == os.geteuid():
                os.chown(name, self.uid, self.gid, dir_fd=folder, follow_symlinks=False)


def child_user(settings: Settings) -> ChildUser | None:
    """Return the user of the setting; None where it names none. Raises GPUFlowError for one that cannot be taken."""
    return None if settings.child_user is None else _found(settings.child_user)


@lru_cache(maxsize=8)
def _found(name: str) -> ChildUser:
    import pwd  # of Unix alone, and clients import this file

    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise GPUFlowError(
            f"GPUFLOW_CHILD_USER is {name!r}, and this machine has no such user; make it with "
            f"`useradd --system --create-home {name}`, or name another"
        ) from None
    if os.geteuid() != 0:
        raise GPUFlowError(
            f"GPUFLOW_CHILD_USER is {name!r}, and this worker does not run as root, so it cannot change the user; "
            "unset it, or start the worker as root"
        )
    if entry.pw_uid == 0:
        raise GPUFlowError(f"GPUFLOW_CHILD_USER is {name!r}, which is root; name a user without rights")
    groups = tuple(os.getgrouplist(name, entry.pw_gid))
    return ChildUser(name=name, uid=entry.pw_uid, gid=entry.pw_gid, groups=groups, home=entry.pw_dir)


def prepare_folders(settings: Settings, python_path: str | None) -> None:
    """Make the folders that children use theirs, and see that they get there. Raises GPUFlowError, OSError."""
    user = child_user(settings)
    if user is None:
        return
    settings.results_dir.mkdir(parents=True, exist_ok=True)
    settings.cache_dir.mkdir(parents=True, exist_ok=True)
    let_through(settings.results_dir)
    if settings.cache_dir.stat().st_uid == 0:
        user.own(settings.cache_dir)
    paths = [str(settings.results_dir), str(settings.cache_dir), *([python_path] if python_path else [])]
    code = "import os, sys; print([p for p in sys.argv[1:] if not os.access(p, os.X_OK)])"
    lacking = sys.executable
    with contextlib.suppress(PermissionError):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, *paths],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            user=user.uid,
            group=user.gid,
            extra_groups=user.groups,
            env={},
            cwd="/",
            timeout=_CHECK_SECONDS,
        )
        if done.returncode == 0:
            lacking = done.stdout.decode("utf-8", "replace").strip().strip("[]")
    if lacking:
        raise GPUFlowError(
            f"GPUFLOW_CHILD_USER is {user.name!r}, who cannot reach {lacking}; let others search the folders above it "
            "(`chmod o+x`), or set RESULTS_DIR, GPUFLOW_CACHE_DIR and GPUFLOW_ENV_DIR to folders outside of homes"
        )


def let_through(folder: Path) -> None:
    """Let others reach what they may in a folder, without seeing what there is. Raises OSError."""
    mode = folder.stat().st_mode & 0o7777
    if mode & _SEARCH != _SEARCH:
        folder.chmod(mode | _SEARCH)


@contextlib.contextmanager
def files_as(user: ChildUser | None) -> Iterator[None]:
    """Let this thread use files with the rights of a user, and no more, while the block runs. Raises OSError.

    What a task has left is not to lead root anywhere, and what is made for it is to be its own. setfsuid(2) leaves the
    supplementary groups, so they are changed too: by the system call, as the function of libc changes all threads.
    A thread that cannot be given its rights back is not to go on with more or less of them: OSError.
    """
    if user is None or sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.getgroups()
    _set_groups(libc, user.groups)
    gid = libc.setfsgid(user.gid)  # both return what was before
    uid = libc.setfsuid(user.uid)
    try:
        yield
    finally:
        libc.setfsuid(uid)
        libc.setfsgid(gid)
        _set_groups(libc, before)


def _set_groups(libc: ctypes.CDLL, groups: Sequence[int]) -> None:
    """Set the supplementary groups of this thread alone. Raises OSError."""
    number = _SETGROUPS.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, "GPUFLOW_CHILD_USER knows no setgroups(2) for this kind of machine; unset it")
    ids = (ctypes.c_uint32 * len(groups))(*groups)
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(len(groups)), ids) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setgroups: {os.strerror(number)}")


def owner_of(settings: Settings, folder: Path) -> ChildUser | None:
    """Return the user of children if it was given this folder: that of a container's attempt stays the worker's."""
    user = child_user(settings)
    return user if user is not None and folder.stat().st_uid == user.uid else None


def hand_over(settings: Settings, folder: Path) -> None:
    """Give the folder of a new attempt to the user of children. Raises OSError."""
    user = child_user(settings)
    if user is not None:
        let_through(folder.parent)
        user.own(folder)
