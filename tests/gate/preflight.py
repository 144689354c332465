"""Says, before anything is built or tested, what the machine is like. Standard library only."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Final

from tests.gate import leftovers

#: What all environments and what the tests write take together.
NEEDED_GIB: Final = 15
#: What brokers of tests want of the disk in memory; below, they write to the disk.
BROKER_GIB: Final = 1
#: So many of the busiest other processes are named.
MOST_BUSY: Final = 5
_MEMORY_DISK: Final = Path("/dev/shm")


def lines(folder: Path) -> list[str]:
    """Return one line for each thing that decides how a run goes: processors, load, memory, disks, leftovers."""
    load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
    free = shutil.disk_usage(folder).free / 2**30
    said = [
        f"python {platform.python_version()}, {os.cpu_count()} processors, load {load}",
        f"memory available: {_memory_gib():.1f} GiB",
        f"disk free: {free:.1f} GiB" + (f"; the gate takes up to {NEEDED_GIB} GiB" if free < NEEDED_GIB else ""),
        _memory_disk(),
        *(f"busy beside us: {one}" for one in _busy(1.0)),
    ]
    older = leftovers.find("", whole_run=True)
    said += [f"left over by an earlier run: {one}" for one in older] or ["no processes of earlier runs"]
    return said


def _memory_disk() -> str:
    if not _MEMORY_DISK.is_dir():
        return f"there is no {_MEMORY_DISK}: brokers of tests write to the disk"
    free = shutil.disk_usage(_MEMORY_DISK).free / 2**30
    return f"{_MEMORY_DISK} free: {free:.1f} GiB" + (
        "; brokers of tests write to the disk" if free < BROKER_GIB else ""
    )


def _busy(seconds: float) -> list[str]:
    """Return which processes took most of a processor in the next `seconds` (proc(5)); those above a tenth of one."""
    before = _ticks()
    time.sleep(seconds)
    spent = {pid: now - before.get(pid, now) for pid, now in _ticks().items() if pid != os.getpid()}
    most = sorted(spent, key=lambda pid: -spent[pid])[:MOST_BUSY]
    full = os.sysconf("SC_CLK_TCK") * seconds
    return [f"pid {pid}, {spent[pid] / full:.0%}: {_command(pid)}" for pid in most if spent[pid] > full / 10]


def _ticks() -> dict[int, int]:
    """Return the processor time of each process, in clock ticks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100].strip()
    return "it has ended"


def _memory_gib() -> float:
    path = Path("/proc/meminfo")
    if not path.exists():
        return 0.0
    fields = dict(line.split(":") for line in path.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 2**20
