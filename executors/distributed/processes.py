"""Small things that the launcher, the agent and the ranks share: the end with a parent, ranks that can be found.

For the standard library alone: each of them is ready for signals before it imports anything that takes time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_NOTICE: Final = "notice"


def end_with(parent: int) -> None:
    """Have this process killed when the main thread of `parent`, which started it, ends; leave if it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class Roster:
    """The ranks that run, as files in a folder of their task, so that a notice reaches each of them.

    A rank enters once it can take signals, and looks for the notice after that. The notice is written down before it
    is sent. So each rank gets it, whenever it starts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enter(self, rank: int) -> None:
        """Note that this process is `rank`; send itself a notice that has been given already."""
        (self._folder / f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
        if (self._folder / _NOTICE).exists():
            os.kill(os.getpid(), signal.SIGUSR1)

    def give_notice(self) -> None:
        """Send the notice (SIGUSR1) to every rank that runs, and leave it for those that are still starting."""
        (self._folder / _NOTICE).touch()
        for path in self._folder.glob("rank-*.pid"):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(path.read_text("utf-8")), signal.SIGUSR1)
