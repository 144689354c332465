"""The end of a session's process: nothing that it started is left, whatever threads and libraries still do."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

import psutil

#: How long the killed may take to go, in seconds.
_GONE_SECONDS = 5.0


def leave(code: int) -> NoReturn:
    """Kill all descendants and end the process with `code`, without waiting for any thread."""
    end_descendants()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_descendants() -> None:
    """Kill every process below this one and wait until they have gone."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=_GONE_SECONDS)
