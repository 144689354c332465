"""Which folders of the worker a task may read and write, judged by what has been opened, not by what was written.

A path is opened without effect (O_PATH), the kernel is asked what that is (/proc/self/fd), and only the same open file
is used after that: a link out of a root, `..`, /proc/self/environ, and a folder that is swapped for a link meanwhile
all show as what they are. A hard link does not: Linux forbids making one to a file of others
(fs.protected_hardlinks), and a root should be on a file system of its own where tasks of users write.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuflow.errors import NotAllowed
from gpuflow.policy.refusal import Refusal

READ_SETTING: Final = "GPUFLOW_READ_ROOTS"
WRITE_SETTING: Final = "GPUFLOW_WRITE_ROOTS"
_HANDLE: Final = getattr(os, "O_PATH", 0)
_DESCRIPTORS: Final = Path("/proc/self/fd")


@dataclass(frozen=True, kw_only=True)
class Roots:
    """Folders below which tasks may read and write (what may be written may be read), and those of gpuflow's own.

    `own` are real paths already: no link in them is followed.
    """

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    def refusal(self, real: str, *, shown: str, write: bool = False, path: str = "") -> Refusal | None:
        """Say why the file or folder at the real path `real` is refused; None: it is not."""
        roots = self.write if write else (*self.write, *self.read)
        if any(is_below(real, os.path.realpath(root)) for root in roots):
            return None
        if not write and any(is_below(real, root) for root in self.own):
            return None
        setting = WRITE_SETTING if write else READ_SETTING
        where = f"{path}: {shown}" if path else shown
        return Refusal(
            path=path,
            setting=setting,
            message=f"{where} is in no folder that tasks may {'write' if write else 'read'}; to allow it, list one in "
            f"{setting} of the worker",
        )


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a path has led to: its real path, and one by which exactly this open file is read while the block lasts."""

    real: Path
    place: Path
    is_folder: bool
    is_file: bool


def is_below(real: str, root: str) -> bool:
    """Say whether a real path is a real folder or lies below it."""
    return real == root or real.startswith(root.rstrip("/") + "/")


@contextlib.contextmanager
def opened(path: str | Path, roots: Roots | None, *, field: str = "") -> Iterator[Opened]:
    """Open what a task names for reading; the block reads it by `place`. Raises NotAllowed, OSError.

    Nothing outside of the roots is said to be there or not: both are refused.
    """
    expanded = Path(path).expanduser()
    try:
        descriptor = os.open(expanded, _HANDLE or os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        check_missing(expanded, roots, field=field)
        raise
    try:
        real = _real(descriptor, expanded)
        if roots is not None:
            _raise_if(roots.refusal(real, shown=str(path), path=field))
        mode = os.fstat(descriptor).st_mode
        place = _DESCRIPTORS / str(descriptor) if _HANDLE else Path(real)
        yield Opened(
            real=Path(real.removesuffix(" (deleted)")),
            place=place,
            is_folder=stat.S_ISDIR(mode),
            is_file=stat.S_ISREG(mode),
        )
    finally:
        os.close(descriptor)


def readable(path: str | Path, roots: Roots | None, *, field: str = "") -> Path:
    """Return the real path of a folder or file that others open later, as libraries do. Raises NotAllowed, OSError.

    After this nobody outside of the roots can lead it elsewhere; one who may write in a root can.
    """
    if roots is None:
        return Path(path).expanduser()
    with opened(path, roots, field=field) as found:
        return found.real


def writable(path: str | Path, roots: Roots | None, *, field: str = "") -> Path:
    """Return the real path of a folder to write in, which may not be there yet. Raises NotAllowed."""
    expanded = Path(path).expanduser()
    if roots is None:
        return expanded
    real = os.path.realpath(expanded)
    _raise_if(roots.refusal(real, shown=str(path), write=True, path=field))
    return Path(real)


def check_missing(path: str | Path, roots: Roots | None, *, field: str = "") -> None:
    """Raise NotAllowed for a path that is not there, and would be refused if it were."""
    if roots is not None:
        real = os.path.realpath(Path(path).expanduser())
        _raise_if(roots.refusal(real, shown=str(path), path=field))


def _real(descriptor: int, path: Path) -> str:
    if _HANDLE:
        return str((_DESCRIPTORS / str(descriptor)).readlink())
    real = os.path.realpath(path)
    found, named = os.fstat(descriptor), Path(real).lstat()
    if (found.st_dev, found.st_ino) != (named.st_dev, named.st_ino):
        raise NotAllowed(f"{path} changed while it was opened; submit again when nobody writes to it", READ_SETTING)
    return real


def _raise_if(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise NotAllowed(refusal.message, refusal.setting)
