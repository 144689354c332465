"""Locks on open files, the same on Linux, macOS and Windows.

Anyone may call it; it knows no folder and no purpose. A lock belongs to the open file: it ends when the file is closed,
or with its process, however that ends. It keeps out others who lock, not those who read or write.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Windows locks a range of bytes against all access: one that lies behind the end of any file.
_WINDOWS_OFFSET: Final = 1 << 62
_WINDOWS_POLL_SECONDS: Final = 0.05

if sys.platform == "win32":
    import msvcrt

    def try_lock(descriptor: int) -> bool:
        """Lock an open file for us alone; say False when somebody else has it. Raises OSError."""
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _WINDOWS_OFFSET, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        finally:
            os.lseek(descriptor, at, os.SEEK_SET)
        return True

    def lock(descriptor: int) -> None:
        """Lock an open file for us alone, after whoever has it. Raises OSError."""
        while not try_lock(descriptor):
            time.sleep(_WINDOWS_POLL_SECONDS)

else:

    def try_lock(descriptor: int) -> bool:
        """Lock an open file for us alone; say False when somebody else has it. Raises OSError."""
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lock(descriptor: int) -> None:
        """Lock an open file for us alone, after whoever has it. Raises OSError."""
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextlib.contextmanager
def holding(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, an empty file that is made where it is missing, for the block. Raises OSError."""
    with path.open("ab") as file:
        lock(file.fileno())
        yield
