"""Where the log of a session goes: a file for each load, of which the last few are kept."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path
from typing import Final

#: Logs that are kept of all sessions of a worker, beside those that are written to.
KEPT: Final = 50

_numbers = itertools.count(1)


def new_log(folder: Path, title: str) -> Path:
    """Return the path of a new log, and remove the oldest ones. Raises OSError where the folder cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = sorted(folder.glob("*.log"))  # their names begin with the time
    for old in logs[: max(0, len(logs) - KEPT)]:
        with contextlib.suppress(OSError):
            old.unlink()
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{next(_numbers):04}-{title}.log"
