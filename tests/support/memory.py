"""The most resident memory that a process has ever had, as the kernel counts it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path


def peak_bytes(pid: int | str) -> int:
    """Return VmHWM of a process: its resident memory at its highest."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def peak_growth(pid: int) -> Iterator[Callable[[], int]]:
    """Give what tells, while and after the block, by how much the peak of a process has risen since its begin."""
    # 5 sets the peak back to what is resident now (proc(5), clear_refs).
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before, after = peak_bytes(pid), 0
    over = False

    def growth() -> int:
        return (after if over else peak_bytes(pid)) - before

    yield growth
    after, over = peak_bytes(pid), True
