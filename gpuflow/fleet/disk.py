"""How much disk is free where results are written. Used by `explain`, and by the worker for what it tells of itself."""

from __future__ import annotations

from pathlib import Path

import psutil


def free_mib(folder: Path) -> int | None:
    """Return what is free in the file system of a folder, in MiB; the folder need not exist. None if unreadable."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return int(psutil.disk_usage(str(place)).free >> 20)
    except OSError:
        return None
