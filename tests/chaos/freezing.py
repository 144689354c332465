"""Processes that are stopped for a while (SIGSTOP), as a paused virtual machine is."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil

from tests.support.waiting import eventually


@contextlib.contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Stop processes for the time of the block, which begins when each of them stands still."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        eventually(
            lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids),
            what=f"processes {pids} stopped",
        )
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
