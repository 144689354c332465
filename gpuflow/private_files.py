"""Small files that only this user may read: secrets of a state folder, and records beside them.

A file appears whole, by rename, with mode 0600 from its first moment. `open_new` is for folders in which a task may
have put links.
"""

from __future__ import annotations

import io
import os
import secrets
from pathlib import Path
from typing import BinaryIO


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read; it is on disk afterwards. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_secret(path: Path) -> str | None:
    """Return the secret of a file, or None when there is none or it may not be read."""
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def make_secret(path: Path) -> str:
    """Return the secret of a file, made on first use: 32 random bytes as URL-safe text. Raises OSError."""
    if read_secret(path) is None:
        write_private(path, secrets.token_urlsafe(32))
    return path.read_text().strip()


def open_new(path: Path) -> BinaryIO:
    """Open a new file for writing; what was there of that name, a link too, is removed first. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileExistsError:
        path.unlink()
        descriptor = os.open(path, flags, 0o666)
    return os.fdopen(descriptor, "wb", io.DEFAULT_BUFFER_SIZE)
