"""Marks what is kept here as just used, so that neither the limit of the cache nor the retention of uploads takes it.

Called where something is found again: the inputs of a task in the cache, an upload in a folder. Both clean by the time
of change.
"""

from __future__ import annotations

import os
from pathlib import Path


def mark_used(path: Path) -> bool:
    """Set the time of change of a file or folder to now, where we may; say whether it is there."""
    try:
        os.utime(path)
    except OSError:
        return path.exists()
    return True
