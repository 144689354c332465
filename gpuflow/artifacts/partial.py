"""An unfinished file: hashed as it grows, resumable, visible only when it is whole. And what the disk says.

Called by the stores, mostly through `receiving`. The unfinished file stands beside its target as
`.gpuflow-<target>-<source>.part`; both parts of the name are digests, so that what is left of another version of the
source is never gone on with. It knows no protocol: it is given bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from gpuflow.artifacts.store import RESERVED_PREFIX
from gpuflow.artifacts.throttle import BLOCK_BYTES
from gpuflow.errors import ArtifactError
from gpuflow.filelocks import try_lock
from gpuflow.terminal import log_value

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Bytes after which the disk is set to work: measured, twice to four times the rate of one fsync at the end.
_FLUSH_BYTES: Final = 32 << 20
_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
#: Bytes that the kernel copies at a time, and how many of them the digest may lag behind: they stay in memory so long.
_COPY_BYTES: Final = 8 << 20
_MOST_BEHIND_BYTES: Final = 256 << 20
#: A file system, or a sandbox, that does not let the kernel copy.
_NO_COPY: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})


class PartFile:
    """The unfinished file of `target`. One process at a time goes on with it; a second one gets a file of its own.

    What earlier transfers to the same target have left is removed, unless one is under way. `size` is the count of
    bytes that are there already. Raises OSError.
    """

    def __init__(self, target: Path, source_id: str, *, resume: bool = True) -> None:
        self.target = target
        self.size = 0
        self._family = _family(target)
        self._hash = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._committed = False
        self._flushing_from = 0
        self._hashed = 0
        self._flushed = -1
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
            locked = try_lock(file.fileno())
            if locked and _is_at(file, path):
                return path, file
            file.close()
            if not locked:
                path = self.target.with_name(f"{self._family}{secrets.token_hex(8)}.part")

    def _sweep(self) -> None:
        for other in self.target.parent.glob(f"{self._family}*.part"):
            if other != self.path:
                with contextlib.suppress(OSError), io.FileIO(other) as file:
                    if try_lock(file.fileno()) and _is_at(file, other):
                        other.unlink()

    def append(self, block: bytes) -> None:
        """Write a block at the end; a second thread hashes it meanwhile. Raises OSError."""
        self._wait_for_digest()
        self._later(self._hash.update, block)
        view = memoryview(block)
        while view:
            view = view[self._file.write(view) :]
        self.size += len(block)
        self._flush_up_to(self.size)

    def copy(self, source: BinaryIO, passed: Callable[[int], None]) -> None:
        """Let the kernel copy what is left of a file that stands where this one ends, as far as it can.

        The caller appends the rest. `passed` is told the count of bytes each time. The digest is taken of what was
        stored, by a second thread. Raises OSError.
        """
        if sys.platform != "linux":
            return
        buffer = memoryview(bytearray(BLOCK_BYTES))
        while True:
            try:
                count = os.copy_file_range(source.fileno(), self._file.fileno(), _COPY_BYTES)
            except OSError as error:
                if error.errno in _NO_COPY:
                    return
                raise
            if not count:
                return
            self._later(self._hash_stored, self.size, self.size + count, buffer)
            self.size += count
            passed(count)
            self._wait_for_digest(most_left=_MOST_BEHIND_BYTES // _COPY_BYTES)
            self._flush_up_to(self._hashed)

    def _hash_stored(self, start: int, end: int, buffer: memoryview) -> None:
        if sys.platform != "linux":
            return
        at = start
        while at < end:
            count = os.preadv(self._file.fileno(), [buffer[: end - at]], at)
            if not count:
                raise OSError(errno.EIO, "what was written is not there")
            self._hash.update(buffer[:count])
            at += count
        self._hashed = end

    def _flush_up_to(self, end: int) -> None:
        """Set the disk to work. Of a copy only on what has its digest, which may leave the memory by this."""
        if end - self._flushing_from >= _FLUSH_BYTES:
            _start_flush(self._file.fileno(), self._flushing_from, end)
            self._flushing_from = end

    def _later(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="gpuflow-sha256")
        self._pending.append(self._pool.submit(action, *arguments))

    def _wait_for_digest(self, *, most_left: int = 0) -> None:
        """Wait until the digest is behind by so many pieces at most. Raises OSError."""
        while len(self._pending) > most_left:
            self._pending.popleft().result()

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of what is there, in hex. Raises OSError."""
        self._wait_for_digest()
        return self._hash.hexdigest()

    def flush(self) -> None:
        """Bring it to the disk; the digest is taken meanwhile. Raises OSError."""
        if self._flushed != self.size:
            os.fsync(self._file.fileno())
            self._flushed = self.size

    def commit(self) -> None:
        """Make it the target, by rename, when it is on the disk and its digest is taken. Raises OSError."""
        self.flush()
        self._wait_for_digest()
        if sys.platform == "win32":  # there an open file cannot be renamed
            self._file.close()
        self.path.replace(self.target)
        self._committed = True
        _sync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove what is there, unless it is the target already."""
        if not self._committed:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
            full = isinstance(error, OSError) and error.errno in _FULL
            if not self._committed and (full or self.size == 0):
                self.discard()
        finally:
            self._file.close()


def left_over(target: Path) -> int:
    """Return the bytes of the largest unfinished file of `target`, of whatever source; 0 for none. Raises OSError."""
    sizes = [0]
    for path in target.parent.glob(f"{_family(target)}*.part"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.lstat().st_size)
    return max(sizes)


def has_content(path: Path, sha256: str | None, size: int | None = None) -> bool:
    """Say whether `path` is a file with that digest (and size); False when no digest is asked for. Raises OSError."""
    if not sha256 or not path.is_file() or (size is not None and path.stat().st_size != size):
        return False
    return file_digest(path) == sha256.lower()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises OSError."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class DiskTrouble(ArtifactError, OSError):
    """What a disk refused. It is an OSError too, with its errno, as another machine's disk may have room."""

    def __init__(self, text: str, number: int | None) -> None:
        super().__init__(text)
        self.errno = number


@contextlib.contextmanager
def disk_errors(action: str) -> Iterator[None]:
    """Turn an OSError of the block into DiskTrouble: `action` begins its sentence ("a.bin cannot be stored")."""
    try:
        yield
    except DiskTrouble:
        raise
    except OSError as error:
        if error.errno in _FULL:
            mend = "free some space there, or choose another folder"
        elif error.errno in _FORBIDDEN:
            mend = "give this user the right to it"
        else:
            mend = "check that the folder is there and its disk is sound"
        raise DiskTrouble(
            f"{log_value(action)}: {error.strerror or type(error).__name__}; {mend}", error.errno
        ) from error


def _start_flush(descriptor: int, start: int, end: int) -> None:
    """Ask Linux to begin writing a range to the disk, so that little is left for the fsync at the end."""
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


def _family(target: Path) -> str:
    """Return what the names of all unfinished files of `target` begin with."""
    return f"{RESERVED_PREFIX}{_short(target.name)}-"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


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
