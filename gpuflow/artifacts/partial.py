"""Receives one file block by block: hashed on the way, resumable, visible only when it is whole and right.

Called by the stores. The unfinished file stands beside its target as `.gpuflow-<target>-<source>.part`; both parts of
the name are digests, so that what is left of another version of the source is never gone on with. It knows no
protocol: a store gives it blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from gpuflow.artifacts.store import RESERVED_PREFIX, Progress, Throttle
from gpuflow.artifacts.throttle import BLOCK_BYTES
from gpuflow.errors import ArtifactError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Bytes after which the disk is set to work: measured, twice to four times the rate of one fsync at the end.
_FLUSH_BYTES: Final = 32 << 20
_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class Meter:
    """Tells a progress callback of each byte once, however often a transfer begins again.

    `offset` is how far the transfer has ever come.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self.offset = progress, 0

    def reached(self, offset: int) -> None:
        """Tell that the file is over up to `offset`."""
        if offset > self.offset:
            count, self.offset = offset - self.offset, offset
            if self._progress is not None:
                self._progress(count)


class PartFile:
    """The unfinished file of `target`. One process at a time goes on with it; a second one gets a file of its own.

    What earlier transfers to the same target have left is removed, unless one is under way. `size` is the count of
    bytes that are there already. Raises OSError.
    """

    def __init__(self, target: Path, source_id: str, *, resume: bool = True) -> None:
        self.target = target
        self.size = 0
        self._family = f"{RESERVED_PREFIX}{_short(target.name)}-"
        self._hash = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._committed = False
        self._flushing_from = 0
        target.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._file = self._open(_short(source_id))
        try:
            self._sweep()
            if resume:
                while block := self._file.read(BLOCK_BYTES):
                    self._hash.update(block)
                    self.size += len(block)
            else:
                self._file.truncate()
            self._flushing_from = self.size
        except BaseException:
            self._file.close()
            raise

    def _open(self, source: str) -> tuple[Path, io.FileIO]:
        path = self.target.with_name(f"{self._family}{source}.part")
        while True:
            file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o666), "r+")
            locked = _lock(file)
            if locked and _is_at(file, path):
                return path, file
            file.close()
            if not locked:
                path = self.target.with_name(f"{self._family}{secrets.token_hex(8)}.part")

    def _sweep(self) -> None:
        for other in self.target.parent.glob(f"{self._family}*.part"):
            if other != self.path:
                with contextlib.suppress(OSError), io.FileIO(other) as file:
                    if _lock(file) and _is_at(file, other):
                        other.unlink()

    def append(self, block: bytes) -> None:
        """Write a block at the end; a second thread hashes it meanwhile. Raises OSError."""
        self._settle()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="gpuflow-sha256")
        self._pending = self._pool.submit(self._hash.update, block)
        view = memoryview(block)
        while view:
            view = view[self._file.write(view) :]
        self.size += len(block)
        if self.size - self._flushing_from >= _FLUSH_BYTES:
            self._start_flush()

    def _start_flush(self) -> None:
        """Ask Linux to begin writing what is new to the disk, so that little is left for the fsync at the end."""
        if sys.platform == "linux":
            new = self.size - self._flushing_from
            os.posix_fadvise(self._file.fileno(), self._flushing_from, new, os.POSIX_FADV_DONTNEED)
        self._flushing_from = self.size

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of what is there, in hex."""
        self._settle()
        return self._hash.hexdigest()

    def commit(self) -> None:
        """Make it the target, by rename, when it is on the disk. Raises OSError."""
        os.fsync(self._file.fileno())
        self.path.replace(self.target)
        self._committed = True
        _sync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove what is there."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._pool is not None:
                self._pool.shutdown()
            full = isinstance(error, OSError) and error.errno in _FULL
            if not self._committed and (full or self.size == 0):
                self.discard()
        finally:
            self._file.close()


def receive(
    target: Path,
    *,
    source_id: str,
    size: int | None,
    sha256: str | None,
    blocks: Callable[[int], Iterable[bytes]],
    meter: Meter,
) -> tuple[int, str]:
    """Bring a file to `target` and return its size in bytes and its SHA-256.

    `blocks(offset)` yields the bytes of the source from `offset` on; `source_id` names this version of the source
    (an ETag, or size and time). When an exception of `blocks` passes through, the next call goes on where it ended.
    Raises ArtifactError when size or digest are not those asked for, OSError from the disk.
    """
    for resume in (True, False):
        with PartFile(target, source_id, resume=resume) as part:
            resumed = part.size > 0
            if size is None or part.size <= size:
                meter.reached(part.size)
                for block in blocks(part.size):
                    part.append(block)
                    meter.reached(part.size)
            fault = _difference(part, size, sha256)
            if fault is None:
                part.commit()
                return part.size, part.sha256
            part.discard()
        if not resumed:
            break
    raise ArtifactError(f"{target.name} is not what was stored: {fault}; store it again")


def _difference(part: PartFile, size: int | None, sha256: str | None) -> str | None:
    if size is not None and part.size != size:
        return f"it has {part.size} bytes instead of {size}"
    if sha256 and part.sha256 != sha256.lower():
        return f"its SHA-256 is {part.sha256} instead of {sha256.lower()}"
    return None


def has_content(path: Path, sha256: str | None, size: int | None = None) -> bool:
    """Say whether `path` is a file with that digest (and size); False when no digest is asked for. Raises OSError."""
    if not sha256 or not path.is_file() or (size is not None and path.stat().st_size != size):
        return False
    return file_digest(path) == sha256.lower()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_blocks(stream: BinaryIO, throttle: Throttle) -> Iterator[bytes]:
    """Yield what a file holds from where it stands, as fast as the throttle lets it."""
    while block := stream.read(throttle.block_bytes):
        throttle.take(len(block))
        yield block


@contextlib.contextmanager
def disk_errors(action: str) -> Iterator[None]:
    """Turn an OSError of the block into an ArtifactError: `action` begins its sentence ("a.bin cannot be stored")."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            mend = "free some space there, or choose another folder"
        elif error.errno in _FORBIDDEN:
            mend = "give this user the right to it"
        else:
            mend = "check that the folder is there and its disk is sound"
        raise ArtifactError(f"{action}: {error.strerror or type(error).__name__}; {mend}") from error


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _lock(file: io.FileIO) -> bool:
    if sys.platform == "win32":  # there an open file cannot be renamed or removed by another process
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk, where folders can be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_at(file: io.FileIO, path: Path) -> bool:
    """Say whether an open file still is the one at `path`: another process may have renamed or removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False
