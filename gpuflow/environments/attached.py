"""Python processes that end with us, and everything that they start: also when we are killed.

Each runs in a process group of its own, behind a thread that waits for the end of its stdin, a pipe from us. Called by
`installing` and `checking`. (On Windows, where no worker runs, only the process itself is ended, and only by us.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_IS_POSIX: Final = os.name == "posix"
_WATCH: Final = """
def _watch():
    import os, signal
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
import threading
threading.Thread(target=_watch, daemon=True).start()
"""
_RUN_MODULE: Final = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@contextlib.contextmanager
def attached(
    python: Path, options: Sequence[str], code: str, arguments: Sequence[str], *, keep: Sequence[int] = (), **extra: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a Python that runs `code`, and end its whole group with the block. `keep` are descriptors it inherits.

    Its output is text; `extra` goes to Popen. Raises OSError when it cannot be started.
    """
    posix: dict[str, Any] = {"pass_fds": tuple(keep), "start_new_session": True} if _IS_POSIX else {}
    source = _WATCH + code if _IS_POSIX else code
    process = subprocess.Popen(
        [str(python), *options, "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        **posix,
        **extra,
    )
    lifeline, process.stdin = process.stdin, None  # or `communicate` would close it
    try:
        yield process
    finally:
        _end(process)
        if lifeline is not None:
            lifeline.close()


def attached_module(
    python: Path, module: str, arguments: Sequence[str], *, keep: Sequence[int] = (), env: Mapping[str, str]
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start `python -m module` as `attached` does, with its stderr in its stdout."""
    return attached(python, ["-I"], _RUN_MODULE, [module, *arguments], keep=keep, env=env, stderr=subprocess.STDOUT)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if _IS_POSIX:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.poll() is None:
            process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
