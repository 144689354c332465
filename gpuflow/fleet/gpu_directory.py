"""The lock directory of a machine: which one it is, and files in it that are locked and never lost to a race.

Used by the GPU locks (`fleet.gpu_locks`, `gpu_shares`, `gpu_reservation`) and by `gpuflow doctor`. It knows no GPU.
Workers of several users and containers share the directory: it has mode 1777, its files 0666, whatever the
umask. A file appears under its name with its final mode (it is made under another name, then linked), so a process
that is killed at any step leaves nothing that keeps others out. Linux and macOS only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpuflow.errors import GPUFlowError

_RUN_LOCK: Final = Path("/run/lock")
_TMP: Final = Path("/tmp")  # noqa: S108 - all users of the machine have to find the same folder
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
_FOLDER_MODE: Final = 0o1777
_FILE_MODE: Final = 0o666
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MUTEX: Final = "machine.lock"
_NEW: Final = ".new-"
#: More is read of no file: a reservation or the ends of tasks take some hundred bytes for each GPU.
MAX_FILE_BYTES: Final = 1 << 20
#: A lock is tried again after this many seconds, growing to the second.
_FIRST_PAUSE_SECONDS: Final = 0.0005
_LONGEST_PAUSE_SECONDS: Final = 0.02
#: A file that is gone again so often after it was made is removed by somebody on purpose.
_TRIES: Final = 100


def default_directory() -> Path:
    """Return the directory that every worker of this machine finds, whoever runs it.

    /run/lock/gpuflow where every user may make or use it; elsewhere `gpuflow-locks` in /tmp. TMPDIR counts only on a
    machine without /tmp: it often differs between users.
    """
    made = _RUN_LOCK / "gpuflow"
    if _for_everyone(made) or (not made.exists() and _for_everyone(_RUN_LOCK)):
        return made
    return (_TMP if _TMP.is_dir() else Path(tempfile.gettempdir())) / "gpuflow-locks"


def _for_everyone(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    wanted = stat.S_ISVTX | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_mode & wanted == wanted and os.access(path, os.W_OK)


def unlock(descriptor: int) -> None:
    """Give a lock back and close the file, also where a fork of this process still has it open."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class LockDirectory:
    """An open lock directory, made where it is missing. Raises GPUFlowError, naming GPUFLOW_LOCK_DIR.

    All paths are names in this very directory, also when another one takes its place. The open directory is locked
    shared, which keeps systemd-tmpfiles away from it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = self._open()
        except OSError as error:
            raise self.unusable(error) from error

    def _open(self) -> int:
        if not self.path.is_symlink() and not self.path.is_dir():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=_FOLDER_MODE)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        found = os.fstat(descriptor)
        if found.st_mode & stat.S_ISVTX and not found.st_mode & stat.S_IWOTH and found.st_uid == os.geteuid():
            os.fchmod(descriptor, _FOLDER_MODE)  # just made here, or by a process of ours that was killed then: umask
        elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            os.close(descriptor)
            raise GPUFlowError(
                f"the lock directory {self.path} lets every user remove the locks of others; "
                f"run `chmod 1777 {self.path}`, or set GPUFLOW_LOCK_DIR to another folder"
            )
        if found.st_uid not in (0, os.geteuid()) and not self._is_unmapped(found.st_uid):
            os.close(descriptor)
            raise GPUFlowError(_foreign(self.path, found.st_uid))
        _shared(descriptor)
        return descriptor

    def _is_unmapped(self, owner: int) -> bool:
        """Whether an owner is one that this user namespace has no number for, of a folder that the operator has named.

        So is root's in a container of a user: its mount is the operator's word.
        """
        try:
            return owner == int(_OVERFLOW_UID.read_text()) and self.path != default_directory()
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """Close it; locks that were taken in it stay."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def in_place(self) -> bool:
        """Whether its path still leads to it."""
        with contextlib.suppress(OSError):
            here, there = os.fstat(self._fd), self.path.lstat()
            return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        return False

    def identity(self) -> str:
        """Return device and inode: equal for all who share the directory, also through a mount."""
        found = os.fstat(self._fd)
        return f"{found.st_dev}:{found.st_ino}"

    def unusable(self, error: OSError, name: str = "") -> GPUFlowError:
        """Return the error to raise: the file, the cause and the mend."""
        at = self.path / name if name else self.path
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and at.is_symlink()):
            cause = "it is a symbolic link"
        else:
            cause = error.strerror or str(error)
        return GPUFlowError(
            f"the lock directory cannot be used: {at}: {cause}; mend it, or set GPUFLOW_LOCK_DIR to a folder "
            "on a local disk that every worker of this machine can write to"
        )

    @contextlib.contextmanager
    def mutex(self, wait_seconds: float) -> Iterator[bool]:
        """Hold the mutex of the machine for the block; False when it could not be had in time."""
        deadline = time.monotonic() + wait_seconds
        pause = _FIRST_PAUSE_SECONDS
        descriptor = self.lock(_MUTEX)
        while descriptor is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            descriptor = self.lock(_MUTEX)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                unlock(descriptor)

    def lock(self, name: str, *, shared: bool = False) -> int | None:
        """Return the open file of that name, locked; None when somebody else has it. Made where it is missing."""
        try:
            for _ in range(_TRIES):
                descriptor = self._existing(name)
                if descriptor is None:
                    made = self._new(name)
                    if made is not None:
                        unlock(made)
                    continue
                try:
                    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(descriptor)
                    return None
                except OSError:
                    os.close(descriptor)
                    raise
                if self._is_at(descriptor, name):
                    return descriptor
                os.close(descriptor)
        except OSError as error:
            raise self.unusable(error, name) from error
        raise self.unusable(OSError(errno.EBUSY, "somebody keeps removing it"), name)

    def lock_new(self, name: str) -> int:
        """Return a new file, locked before it appears. Raises GPUFlowError, also when there is one of that name."""
        try:
            descriptor = self._new(name)
        except OSError as error:
            raise self.unusable(error, name) from error
        if descriptor is None:
            raise self.unusable(OSError(errno.EEXIST, "it is there already"), name)
        return descriptor

    def is_held(self, name: str) -> bool:
        """Whether somebody has a lock on this file. False where there is none; True where it cannot be read."""
        try:
            descriptor = self._existing(name)
        except (OSError, GPUFlowError):
            return True
        if descriptor is None:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return True
        unlock(descriptor)
        return False

    def names(self) -> list[str]:
        """Return the names of all files, without those of files that are being made. Raises GPUFlowError."""
        try:
            return [name for name in self._list() if not name.startswith(".")]
        except OSError as error:
            raise self.unusable(error) from error

    def remove(self, name: str) -> None:
        """Remove a file if this user may."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def tidy(self) -> None:
        """Remove what processes left that were killed while they made a file. The mutex must be held."""
        with contextlib.suppress(OSError):
            for name in self._list():
                if name.startswith(_NEW) and (self._has_its_name(name) or not self.is_held(name)):
                    self.remove(name)

    def _has_its_name(self, name: str) -> bool:
        """Whether a file that was being made is linked to its own name already."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_nlink > 1

    def pin(self) -> int:
        """Return the directory, open once more and locked shared: it stays while somebody holds that."""
        try:
            descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError as error:
            raise self.unusable(error) from error
        _shared(descriptor)
        return descriptor

    def read(self, name: str) -> bytes:
        """Return the content of a small file; nothing when there is none, and no more of it than MAX_FILE_BYTES.

        Any user of the machine may have made it longer. Raises GPUFlowError.
        """
        try:
            descriptor = self._existing(name)
            if descriptor is None:
                return b""
            with os.fdopen(descriptor, "rb") as file:
                return file.read(MAX_FILE_BYTES)
        except OSError as error:
            raise self.unusable(error, name) from error

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a file, in place: in such a directory only its owner could rename over it.

        A reader has to hold the mutex, as the writer does, and to judge what it reads. Raises GPUFlowError.
        """
        try:
            descriptor = self._existing(name, os.O_RDWR)
            if descriptor is None:
                descriptor = self._new(name) or self._existing(name, os.O_RDWR)
            if descriptor is None:
                raise OSError(errno.EBUSY, "somebody keeps removing it")
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                file.write(content)
                file.truncate(len(content))
        except OSError as error:
            raise self.unusable(error, name) from error

    def _list(self) -> list[str]:
        """Raise OSError. Opened anew: the place in a directory belongs to the open file, and threads share that."""
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.listdir(descriptor)  # noqa: PTH208 - a path may lead elsewhere by now
        finally:
            os.close(descriptor)

    def _existing(self, name: str, access: int = os.O_RDONLY) -> int | None:
        """Return the open file, or None. Raises OSError, GPUFlowError.

        Open first, create second: in a sticky directory O_CREAT is refused for what belongs to another user
        (fs.protected_regular).
        """
        try:
            descriptor = os.open(name, access | _FLAGS, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self.unusable(OSError(errno.EINVAL, "it is no plain file; remove it"), name)
        return descriptor

    def _new(self, name: str) -> int | None:
        """Return a new file, locked for us alone; None when there is one of that name. Raises OSError.

        The mutex itself is made without the mutex: whoever has it already may take our file for a leftover, and remove
        it before it is locked.
        """
        for _ in range(_TRIES - 1):
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                return self._made(name)
        return self._made(name)

    def _made(self, name: str) -> int | None:
        unfinished = f"{_NEW}{secrets.token_hex(8)}"
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, _FILE_MODE, dir_fd=self._fd)
        try:
            os.fchmod(descriptor, _FILE_MODE)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(unfinished, name, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
        except FileExistsError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        finally:
            self.remove(unfinished)
        return descriptor

    def _is_at(self, descriptor: int, name: str) -> bool:
        try:
            there = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        here = os.fstat(descriptor)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _foreign(path: Path, owner: int) -> str:
    """Return the error for a directory of another user, who may remove every lock in it."""
    return (
        f"the lock directory {path} belongs to user {owner}, who could give a GPU away twice; let root make it: "
        f"`sudo install -d -m 1777 -o root {path}`, or set GPUFLOW_LOCK_DIR to a folder of root or your own"
    )


def _shared(descriptor: int) -> None:
    """Lock a directory shared, where its file system can: it is a courtesy to cleaners alone."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
