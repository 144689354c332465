"""The shim: one small process between the worker and a task's child, so that nothing of a task outlives its worker.

Started as a script with the interpreter's `-I -S` flags, so it imports only the standard library and starts fast.
Its command line: `shim.py CONTROL_FD STATUS_FD ENV_FD -- PROGRAM ARG...`. Its own stdin, stdout and stderr are the
child's.

* It is a subreaper: grandchildren whose parent dies become its children, so it can end all of them.
* CONTROL_FD is the read end of a pipe to the worker: `t` = SIGTERM to the child's group, `k` = SIGKILL to the whole
  tree. End of file means that the worker is gone or lets go: the tree is killed.
* It exits only when no process of the tree is left, and so whatever it holds open (the lock files of the GPUs) is
  held until then. Before that it writes one JSON line to STATUS_FD: `{"exit": n|null, "signal": n|null,
  "stragglers": n}` (stragglers: processes that were still there when the child itself had ended).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the ids of all living processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def kill_tree() -> int:
    """Send SIGKILL to everything below this process until nothing is left; return how many were alive at first."""
    first = None
    while True:
        alive = descendants(os.getpid())
        first = len(alive) if first is None else first
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, 0 if not alive else os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            if not alive:
                return first
        if alive:
            select.select([], [], [], 0.005)


def start_child(argv: list[str], environment: dict[str, str], close: list[int]) -> int:
    """Start the program in a session of its own; it dies with the shim."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def watch(child: int, control: int, wakeup: int) -> int:
    """Serve the worker's wishes until the child has ended; return its wait status."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wakeup, select.POLLIN)
    while True:
        ready = poller.poll()
        for descriptor, _ in ready:
            word = os.read(descriptor, 64)
            if descriptor == control:
                if not word or b"k" in word:
                    kill_tree_keeping(child)
                    poller.unregister(control)
                elif b"t" in word:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGTERM)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 9
            if pid == child:
                return status
            if pid == 0:
                break


def kill_tree_keeping(child: int) -> None:
    """Kill everything below the shim without reaping `child`, whose status the caller wants."""
    for pid in [*descendants(os.getpid()), child]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run one child and report how it ended."""
    control, status_fd, env_fd = (int(word) for word in sys.argv[1:4])
    argv = sys.argv[5:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with os.fdopen(env_fd, "rb") as stream:
        environment = json.loads(stream.read())
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    child = start_child(argv, environment, [control, status_fd, wakeup, waker])
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    status = watch(child, control, wakeup)
    stragglers = kill_tree()
    ended = {
        "exit": os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "stragglers": stragglers,
    }
    with contextlib.suppress(OSError):
        os.write(status_fd, json.dumps(ended).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
