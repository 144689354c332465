"""Run as a task or as another user: tries what nothing but root may, and prints as JSON what worked.

probe.py workers            read and trace the worker and its shims, look for a secret in every environment
probe.py paths < JSON       read, list, change, remove these paths
probe.py process PID ...    read, trace and end these processes
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ATTACH, _DETACH = 16, 17


def worked(step: Callable[[], Any]) -> bool:
    try:
        step()
    except OSError:
        return False
    return True


def trace(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_ATTACH, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0x40000000)  # __WALL
    libc.ptrace(_DETACH, pid, None, None)


def of_process(pid: int) -> list[str]:
    """Return what could be had of a process."""
    proc = Path(f"/proc/{pid}")
    tries: dict[str, Callable[[], Any]] = {
        "environ": (proc / "environ").read_bytes,
        "mem": (proc / "mem").open,
        "fd": lambda: list((proc / "fd").iterdir()),
        "maps": (proc / "maps").read_bytes,
        "cwd": (proc / "cwd").readlink,
        "trace": lambda: trace(pid),
    }
    return [name for name, step in tries.items() if worked(step)]


def of_path(path: Path) -> list[str]:
    tries: dict[str, Callable[[], Any]] = {
        "read": lambda: path.open("rb").close(),
        "list": lambda: list(path.iterdir()),
        "write": lambda: path.open("r+b").close(),
        "make": lambda: (path if path.is_dir() else path.parent).joinpath("planted").write_text("x"),
        "chmod": lambda: path.chmod(0o777),
        "rename": lambda: path.rename(path.with_name(f"{path.name}.moved")),
        "remove": lambda: shutil.rmtree(path) if path.is_dir() else path.unlink(),
    }
    return [name for name, step in tries.items() if worked(step)]


def ours() -> list[int]:
    """Return the worker, the process that forks shims, and our shim: above us, but for our own executor."""
    found, pid = [], os.getppid()
    while pid > 1:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(word.endswith(b"shim.py") or word == b"celery" for word in words):
            found.append(pid)
        pid = int(fields[1])
    return found


def environments() -> str:
    """Return all environments that can be read."""
    texts = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            texts.append(entry.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(texts)


def main() -> None:
    what, *rest = sys.argv[1:]
    said: Any
    if what == "workers":
        said = {
            "seen": len(ours()),
            "had": [of_process(pid) for pid in ours()],
            "broker": "REDIS_URL=" in environments(),
        }
    elif what == "process":
        ended = [worked(functools.partial(os.kill, int(pid), signal.SIGTERM)) for pid in rest]
        said = {"had": [of_process(int(pid)) for pid in rest], "ended": ended}
    else:
        said = {path: had for path in json.load(sys.stdin) if (had := of_path(Path(path)))}
    print(json.dumps({"event": "result", "value": said}) if what == "workers" else json.dumps(said))


if __name__ == "__main__":
    main()
