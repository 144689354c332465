"""Says, before anything is built or tested, what the machine is like. Standard library only."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Final

from tests.gate import leftovers

#: What all environments and what the tests write take together.
NEEDED_GIB: Final = 15
_MEMORY_DISK: Final = Path("/dev/shm")


def lines(folder: Path) -> list[str]:
    """Return one line for each thing that decides how a run goes: processors, load, memory, disks, leftovers."""
    load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
    free = shutil.disk_usage(folder).free / 2**30
    said = [
        f"python {platform.python_version()}, {os.cpu_count()} processors, load {load}",
        f"memory available: {_memory_gib():.1f} GiB",
        f"disk free: {free:.1f} GiB" + (f"; the gate takes up to {NEEDED_GIB} GiB" if free < NEEDED_GIB else ""),
        f"{_MEMORY_DISK} free: {shutil.disk_usage(_MEMORY_DISK).free / 2**30:.1f} GiB"
        if _MEMORY_DISK.is_dir()
        else f"there is no {_MEMORY_DISK}: brokers of tests write to the disk",
    ]
    older = leftovers.find("", whole_run=True)
    said += [f"left over by an earlier run: {one}" for one in older] or ["no processes of earlier runs"]
    return said


def _memory_gib() -> float:
    path = Path("/proc/meminfo")
    if not path.exists():
        return 0.0
    fields = dict(line.split(":") for line in path.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 2**20
