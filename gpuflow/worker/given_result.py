"""The result that a child gives: in a line, or by a file of its output folder that a line names.

Used by the attempt of a task, and by `standalone`. A file is read once, when the child has ended, and nothing of it is
believed: neither that it lies in the folder, nor its size, nor that it is whole. It knows no process and no record.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from gpuflow.errors import GPUFlowError
from gpuflow.protocol import MAX_LINE_BYTES, MAX_RESULT_BYTES, RESULT_FILE, read_json
from gpuflow.secrets import Redactor

#: What is shown of a piece of a line that is too long, in characters.
_SHOWN: Final = 500
#: Where the name of an event is looked for in a piece of such a line: its first and its last bytes.
_ENDS: Final = 4096
_BEGINS_RESULT: Final = re.compile(rb'\s*\{[^{}\[\]]*"(?:event|type)"\s*:\s*"result"')
_ENDS_RESULT: Final = re.compile(rb'"(?:event|type)"\s*:\s*"result"[^{}\[\]]*\}\s*\Z')


class ResultLost(GPUFlowError):
    """The child completed, and its result cannot be had. `kind` is the type of the task's error."""

    def __init__(self, kind: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable

    def record(self) -> dict[str, Any]:
        """Return the error record of the attempt."""
        return {"type": self.kind, "message": str(self), "retryable": self.retryable}


class GivenResult:
    """Takes note of what a child says of its result; the last word counts. `folder` is its output folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._value: Any = {}
        self._file: str | None = None
        self._too_long = False

    def told(self, data: Mapping[str, Any]) -> None:
        """Note a `result` event."""
        self._too_long = False
        self._file = None if "value" in data else str(data["file"])
        self._value = data.get("value")

    def passed_over(self, piece: bytes) -> None:
        """Note a piece of a line that was too long: it may have been a result."""
        if _BEGINS_RESULT.match(piece[:_ENDS]) or _ENDS_RESULT.search(piece[-_ENDS:]):
            self._too_long = True

    def read(self, redactor: Redactor | None = None) -> dict[str, Any]:
        """Return the result value, without the secrets of a redactor where it comes from a file. Raises ResultLost."""
        if self._too_long:
            raise ResultLost(
                "ResultTooLarge",
                f"the line with the result is longer than {MAX_LINE_BYTES >> 20} MiB; write the value to a file in "
                'OUTPUT_DIR and say {"event": "result", "file": "NAME"}',
            )
        value = self._value if self._file is None else self._content(self._file, redactor)
        return dict(value) if isinstance(value, Mapping) else {"value": value}

    def forget(self) -> None:
        """Remove the file that an Emitter has written; one that a program has named is its own."""
        with contextlib.suppress(OSError):
            (self._folder / RESULT_FILE).unlink()

    def _content(self, name: str, redactor: Redactor | None) -> Any:
        raw = read_inside(self._folder, name)
        try:
            value = read_json(raw)
            return value if redactor is None else redactor.data(value, shapes=False)
        except (ValueError, RecursionError) as error:
            raise ResultLost(
                "BadResult",
                f"the file {name!r} with the result is no whole JSON document ({error}); write it to another name, "
                "rename it, and tell of it then",
            ) from None


def shown_piece(piece: bytes) -> str:
    """Return what a log says of a piece of a line that is too long."""
    return (
        f"{piece[:_SHOWN].decode('utf-8', 'replace')} ... ({len(piece)} bytes of a line that is too long for an event)"
    )


def read_inside(folder: Path, name: str) -> bytes:
    """Return the bytes of a file below `folder`; no link on the way there is followed. Raises ResultLost."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise ResultLost(
            "BadResult",
            f"the result is to be in {name!r}, which is no path below OUTPUT_DIR; give one such as result.json",
        )
    try:
        descriptor = _open_inside(folder, parts)
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            os.close(descriptor)
            raise ResultLost("BadResult", f"{name!r}, which is to hold the result, is no plain file; write one")
        with os.fdopen(descriptor, "rb") as file:
            raw = file.read(MAX_RESULT_BYTES + 1) if state.st_size <= MAX_RESULT_BYTES else b""
            size = max(state.st_size, len(raw))
    except OSError as error:
        raise _unreadable(name, error) from None
    if size > MAX_RESULT_BYTES:
        raise ResultLost(
            "ResultTooLarge",
            f"the file {name!r} with the result has {size >> 20} MiB, over the limit of {MAX_RESULT_BYTES >> 20} MiB; "
            "leave large data in a file of its own, and name that in the result and in an artifact event",
        )
    return raw


def _open_inside(folder: Path, parts: tuple[str, ...]) -> int:
    a_folder = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    a_file = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # without waiting for whoever writes a pipe of that name
    descriptor = os.open(folder, a_folder)
    for number, part in enumerate(parts, start=1):
        flags = a_file if number == len(parts) else a_folder
        try:
            deeper = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = deeper
    return descriptor


def _unreadable(name: str, error: OSError) -> ResultLost:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return ResultLost(
            "BadResult", f"{name!r}, which is to hold the result, is or lies below a link; write a plain file"
        )
    if error.errno == errno.ENOENT:
        return ResultLost(
            "BadResult", f"the file {name!r} with the result is not in OUTPUT_DIR; write it, then tell of it"
        )
    cause = f"the file {name!r} with the result cannot be read: {error.strerror}; look at the disk and its rights"
    return ResultLost("BadResult", cause, retryable=True)
