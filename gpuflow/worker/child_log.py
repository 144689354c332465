"""The log of a child on disk, of an attempt or of a warm session: bounded by `GPUFLOW_CHILD_MAX_LOG_BYTES`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from gpuflow.logs import get_logger

log = get_logger("gpuflow.worker")

#: The most that is kept of the end when a log is cut, in bytes: it is read and written again then.
_MOST_TAIL_BYTES: Final = 8 << 20


class ChildLog:
    """A log that is written as it comes, a context manager; a full disk costs the rest of the file, not the child.

    A log that grows past `max_bytes` is cut: its first half stays, and its end. Raises OSError where it cannot
    be opened.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._file: IO[bytes] | None = path.open("a+b", buffering=0)
        self._size = self._written = self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def write(self, data: bytes) -> None:
        """Write, if the disk still takes it. Never raises."""
        if self._file is None:
            return
        try:
            count = self._file.write(data)
            self._size += count
            self._written += count
            if self._size > self._max_bytes:
                self._cut(self._file)
        except OSError as error:
            log.warning("log_file_given_up", file=self._file.name, cause=str(error))
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what could not be written may be told once more
                file.close()

    def _cut(self, file: IO[bytes]) -> None:
        self._size = os.fstat(file.fileno()).st_size  # somebody else may have emptied it
        if self._size <= self._max_bytes:
            return
        most = min(self._max_bytes // 4, _MOST_TAIL_BYTES)
        tail = os.pread(file.fileno(), most, self._size - most)
        tail = tail[tail.find(b"\n", 0, -1) + 1 :]  # of a last line that is longer, its end
        kept = self._max_bytes // 2
        left_out = self._written - kept - len(tail)
        file.truncate(kept)
        file.write(b"\n[gpuflow: %d bytes are left out here, GPUFLOW_CHILD_MAX_LOG_BYTES]\n" % left_out + tail)
        self._size = file.seek(0, os.SEEK_END)
