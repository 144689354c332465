"""One part of the inputs of one reader, for a process of its own."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from tests.fuzz.campaign import Figures, run
from tests.fuzz.readers import named

#: Inputs of a part.
PART = 2000


def run_part(job: tuple[str, str, int, int]) -> Figures:
    """Run a part of the inputs of one reader."""
    name, seed, start, end = job
    figures = Figures(reader=name)
    with tempfile.TemporaryDirectory(prefix="gpuflow-fuzz-", dir=_memory_disk()) as folder:
        reader = named(name)(Path(folder))
        gc.collect()
        gc.freeze()
        try:
            run(reader, seed, range(start, end), figures)
        finally:
            reader.close()
    return figures


def _memory_disk() -> str | None:
    """Return a folder in memory where the system has one: what is measured is the reader, not the disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
