"""A file that comes in over several requests: locked, hashed as it is written, visible under its name by rename alone.

Used by the uploads alone. Unlike the part of a download (`gpuflow.artifacts.partial`) it refuses a second writer, so
that the offset that a client was told stays true.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from gpuflow.filelocks import try_lock

if TYPE_CHECKING:
    from hashlib import _Hash

_BLOCK_BYTES: Final = 1 << 20
_OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class PartDigest:
    """The running digest of a part at one size (bytes) and time of change (nanoseconds)."""

    running: _Hash
    size: int
    mtime_ns: int


class Part:
    """The bytes of one file that are here so far. One request at a time has it; a context manager that keeps them."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = 0
        self._descriptor = descriptor
        self._hash = hashlib.sha256()
        self._committed = False

    @classmethod
    def open(cls, path: Path, known: PartDigest | None = None, *, resume: bool = True) -> Self | None:
        """Open or create the part at `path`; None while another request has it.

        What is there is read once for its digest, unless `known` still describes it; without `resume` it is dropped.
        Raises OSError.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, _OPEN_FLAGS, 0o666)
            try:
                if not try_lock(descriptor):
                    os.close(descriptor)
                    return None
                # Between open and lock its last owner may have renamed or removed it.
                if _is_at(descriptor, path):
                    part = cls(path, descriptor)
                    if resume:
                        part._catch_up(known)
                    else:
                        os.ftruncate(descriptor, 0)
                    return part
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    @property
    def sha256(self) -> str:
        """Return the digest of what is here, in hex."""
        return self._hash.hexdigest()

    def known(self) -> PartDigest:
        """Return what spares the next `open` in this process to read it all again."""
        mtime_ns = os.fstat(self._descriptor).st_mtime_ns
        return PartDigest(running=self._hash.copy(), size=self.size, mtime_ns=mtime_ns)

    def append(self, block: bytes | bytearray) -> None:
        """Write a block at the end: all of it, or none when OSError is raised."""
        view = memoryview(block)
        done = 0
        try:
            while done < len(view):
                done += os.write(self._descriptor, view[done:])
        except OSError:
            self._cut(self.size)
            raise
        self._hash.update(view)
        self.size += len(view)

    def commit(self, target: Path) -> os.stat_result:
        """Bring it to the disk and give it its name, over a file that has it; return its stat. Raises OSError."""
        os.fsync(self._descriptor)
        found = os.fstat(self._descriptor)
        self.path.replace(target)
        self._committed = True
        _sync_folder(target.parent)
        return found

    def discard(self) -> None:
        """Remove it, unless it has its name already."""
        if not self._committed:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _cut(self, size: int) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, size)
        os.lseek(self._descriptor, size, os.SEEK_SET)

    def _catch_up(self, known: PartDigest | None) -> None:
        found = os.fstat(self._descriptor)
        if known is not None and (known.size, known.mtime_ns) == (found.st_size, found.st_mtime_ns):
            self._hash, self.size = known.running.copy(), known.size
            os.lseek(self._descriptor, self.size, os.SEEK_SET)
            return
        while block := os.read(self._descriptor, _BLOCK_BYTES):
            self._hash.update(block)
            self.size += len(block)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
