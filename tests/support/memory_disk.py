"""Folders on a disk in memory, for tests that write much or that kill what writes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

_DISK: Final = Path("/dev/shm")


@contextmanager
def memory_folder(name: str, otherwise: Path, *, free_mib: int = 256) -> Iterator[Path]:
    """Yield a new folder in memory, or `otherwise` where the machine has no such disk with so much left on it.

    Removes it at the end, and those of test processes that were killed.
    """
    prefix = f"gpuflow-test-{name}-"
    if not _DISK.is_dir() or shutil.disk_usage(_DISK).free >> 20 < free_mib:
        yield otherwise
        return
    for left in _DISK.glob(f"{prefix}*"):
        if not psutil.pid_exists(int(left.name.removeprefix(prefix).partition("-")[0])):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=_DISK))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
