"""The log of a child on disk. Used by attempts and by warm sessions."""

from __future__ import annotations

from typing import IO

from gpuflow.logs import get_logger

log = get_logger("gpuflow.worker")


class LogFile:
    """A log that is written as it comes; a full disk costs the rest of the file, not the child."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file: IO[bytes] | None = file

    def write(self, data: bytes) -> None:
        """Write, if the disk still takes it. Never raises."""
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            log.warning("log_file_given_up", file=self._file.name, cause=str(error))
            self._file = None
