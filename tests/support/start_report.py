"""An executor that reports what its process is: what of a program is settled before its first line, or could differ."""

from __future__ import annotations

import contextlib
import gc
import locale
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from executors.base import Executor
from gpuflow.protocol import Emitter, Request


class StartReport(Executor):
    """Reports and ends."""

    task_types: ClassVar[tuple[str, ...]] = ("tests.start_report",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Return all of it; what must differ between two processes is left out."""
        main = sys.modules["__main__"]
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        kept = ("Umask", "SigBlk", "SigIgn", "NoNewPrivs", "CapEff", "Seccomp")
        streams = (sys.stdin, sys.stdout, sys.stderr)
        alike = {
            "argv": sys.argv,
            "orig_argv": sys.orig_argv,
            "path": sys.path,
            "flags": list(sys.flags),
            "main": [main.__name__, main.__spec__ and main.__spec__.name, main.__file__],
            "environment": dict(os.environ),
            "shown_environment": sorted(_words("/proc/self/environ")),
            "shown_command": " ".join(_words("/proc/self/cmdline")),
            "cwd": str(Path.cwd()),
            "files": _open_files(),
            "streams": [[one.encoding, one.errors, one.line_buffering, one.isatty()] for one in streams],
            "signals": {number.name: _handler(number) for number in signal.Signals},
            "status": {name: status[name].strip() for name in kept},
            "limits": {
                name: resource.getrlimit(getattr(resource, name))
                for name in dir(resource)
                if name.startswith("RLIMIT_")
            },
            "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()],
            "zone": time.tzname,
        }
        return {"preloaded": gc.get_freeze_count() > 0, "alike": alike}


def _handler(number: signal.Signals) -> str:
    handler = signal.getsignal(number)
    return getattr(handler, "__name__", str(handler))


def _words(path: str) -> list[str]:
    return [word.decode() for word in Path(path).read_bytes().split(b"\0") if word]


def _open_files() -> list[str]:
    """Return what is open, by its kind: a pipe is as good as another."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            found.append(f"{entry.name} {str(entry.readlink()).partition(':')[0]}")
    return sorted(found)
