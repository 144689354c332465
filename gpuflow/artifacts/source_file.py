"""Opens the file that a store is given: by one descriptor, a plain file, and no link.

Called by the stores. All of an upload reads this descriptor, so that nobody can give it another file meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from gpuflow.errors import ArtifactError

#: Not there on Windows: O_NONBLOCK, O_CLOEXEC and O_NOFOLLOW. There O_BINARY keeps the bytes as they are.
_FLAGS: Final = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_BINARY", 0)
)


@contextlib.contextmanager
def open_source(source: Path, *, buffered: bool = False) -> Iterator[BinaryIO]:
    """Open a plain file to be read. Raises ArtifactError for any other and for a link, OSError."""
    try:
        descriptor = os.open(source, _FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{source} is not there; nothing was stored") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ArtifactError(f"{source} is a link; name the file itself") from None
    with os.fdopen(descriptor, "rb", buffering=-1 if buffered else 0) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ArtifactError(f"{source} is no plain file; pack a folder into an archive first")
        yield stream


def digest_of(stream: BinaryIO) -> str:
    """Return the SHA-256 of what is left of an open source, in hex. Raises OSError."""
    file: Any = stream  # it has readinto, which the type of what os.fdopen returns lacks
    return hashlib.file_digest(file, "sha256").hexdigest()
