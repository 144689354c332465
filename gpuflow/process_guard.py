"""Keeps a process of ours to itself: its memory from other processes of its user, its files from other users.

Called first by whatever holds the broker's address or a token: worker, beat, gateway, the commands that start them.
`python -m gpuflow.process_guard MODULE ARGUMENT ...` runs another module so. Linux alone knows how to guard memory.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path
from typing import Final

_PR_SET_DUMPABLE: Final = 4  # prctl(2)
#: Nobody but the owner.
PRIVATE_UMASK: Final = 0o077


def guard_memory() -> None:
    """Let no process of this user read our memory, environment or descriptors, or trace us. A program that we run may.

    /proc/PID/environ, /proc/PID/mem and ptrace(2) are refused then to all but root; there is no core dump either.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def guard_process(umask: int = PRIVATE_UMASK) -> None:
    """Guard our memory, and give what we and our children make no more rights than `umask` leaves."""
    guard_memory()
    os.umask(umask)


def process_umask() -> int:
    """Return the umask of this process, without a moment in which it is another one where the system tells it."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("Umask:")).split()[1], 8)
    except (OSError, StopIteration, ValueError):
        now = os.umask(PRIVATE_UMASK)
        os.umask(now)
        return now


def main() -> None:
    """Guard this process, then run the module that the command line names, with the rest of the line."""
    guard_process(int(os.environ.get("GPUFLOW_UMASK") or "077", 8))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
