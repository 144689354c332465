"""The shim: one small process between the worker and a task's child, so that nothing of a task outlives its worker.

A worker starts this script once, with the interpreter's `-I -S` flags (standard library alone): `shim.py SOCKET_FD`.
That process does nothing but fork: for each message on the socket, one shim. A message is JSON `{"argv": [...], "cwd":
..., "at_end": [...], "confined": {...}, "preloaded": false}` with the file descriptors stdin, stdout, stderr, control,
status, environment, and any to be held open; the answer is the shim's process id. A fork costs about a millisecond, a
new interpreter twenty. No other process of its user may read its memory or trace it.

`shim.py SOCKET_FD MODULE` imports what `python -m MODULE` would, without its main program, and then does the same. The
child of a `preloaded` message is that program, in the process that its shim has forked: nothing is executed, nothing
imported again. It differs from a new interpreter in what that reads before its first line: variables of the environment
(`worker.spawner` compares them), the seed of its hashes and where its memory lies, which all such children share. Where
an installation sets variables in each interpreter (`sitecustomize`, .pth), nothing is preloaded.

`confined` says what the child may not (`worker.confinement`): `limits`, its resource limits by name; `user`, `[uid,
gid, groups]` as whom it runs; `group`, the folder of the control group that it joins; `sandboxed`, that argv begins
with bubblewrap, whose two processes are not the child.

* It is a subreaper: grandchildren whose parent dies become its children, so it can end all of them.
* Its control descriptor is the read end of a pipe to the worker: `n` = SIGUSR1 to the child (it is to end soon and go
  on elsewhere), `t` = SIGTERM to the child's group, `k` = SIGKILL to the whole tree. End of file means that the
  worker is gone or lets go: the tree is killed.
* The environment descriptor holds the child's environment as JSON.
* Should it be killed itself, what it leaves behind becomes children of the process that forks shims, which ends them.
* `at_end` is a command for what is no process of the tree (a container). It runs when the tree has ended, also by the
  process that forks shims when the shim was killed; it ends by itself.
* It exits only when no process of the tree is left, and so whatever it holds open (the lock files of the GPUs) is
  held until then. Before that it writes one JSON line to its status descriptor: `{"exit": n|null,
  "signal": n|null, "stragglers": n}` (stragglers: processes that were still there when the child itself had ended).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
#: What the interpreter itself sets at its start, where the locale is C (PEP 538).
_SET_BY_PYTHON = "LC_CTYPE"
#: Looked up once: each shim and each child calls it.
_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


def descendants(root: int, without: Collection[int] = ()) -> list[int]:
    """Return the ids of all living processes below `root`, parents before children; nothing of those in `without`."""
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
            if child not in without:
                found.append(child)
                waiting.append(child)
    return found


def kill_tree() -> int:
    """Send SIGKILL to everything below this process until nothing is left; return how many were alive at first."""
    first = None
    while has_children():
        alive = descendants(os.getpid())
        first = len(alive) if first is None else first
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        select.select([], [], [], 0.002)
    return first or 0


def has_children() -> bool:
    """Reap what has ended; say whether anything is left. A subreaper without a child has no descendant either."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def start_child(
    argv: list[str], environment: dict[str, str], close: list[int], confined: Mapping[str, Any], *, preloaded: bool
) -> int:
    """Start the program in a session of its own, confined as the message says; it dies with the shim.

    Return its process id; 0 in the child itself, if that is preloaded: its caller returns to where the program is run.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        confine(confined)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user takes it away, so it comes after that
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        if preloaded:
            become(argv, environment)
            return 0
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    except ValueError as error:
        os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
    os._exit(127)


def become(argv: list[str], environment: dict[str, str]) -> None:
    """Make this process what `argv` would be before it runs its module: to itself, and to who looks at it."""
    sys.argv[1:] = argv[argv.index("-m") + 2 :]
    sys.orig_argv[:] = argv
    coerced = os.environ.get(_SET_BY_PYTHON)
    os.environ.clear()
    os.environ.update(environment)
    if coerced is not None:
        os.environ[_SET_BY_PYTHON] = coerced
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _prctl(_PR_SET_DUMPABLE, 1)
    with contextlib.suppress(OSError, IndexError):
        show(" ".join(argv), environment)


def show(title: str, environment: dict[str, str]) -> None:
    """Have `ps` and /proc show this command line and, as far as there is room, this environment (proc(5))."""
    with open("/proc/self/stat", "rb") as stat:
        arguments, end, variables, last = (int(field) for field in stat.read().rpartition(b")")[2].split()[45:49])
    # A text up to its NUL, as what is the last byte of all arguments says.
    text = os.fsencode(title)[: end - arguments - 2]
    ctypes.memmove(arguments, text.ljust(end - arguments - 1, b"\0") + b" ", end - arguments)
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())[: last - variables]
    ctypes.memmove(variables, text.ljust(last - variables, b"\0"), last - variables)


def set_at_start() -> list[str]:
    """Return the names of the variables that this interpreter has now and was not started with, or with other values.

    Asked before the process may not be looked at any more: /proc/self is then root's.
    """
    with open("/proc/self/environ", "rb") as stream:
        given = dict(word.partition(b"=")[::2] for word in stream.read().split(b"\0") if word)
    now = dict(os.environb)
    changed = {name for name in now.keys() | given.keys() if now.get(name) != given.get(name)}
    return sorted(name for name in map(os.fsdecode, changed) if name != _SET_BY_PYTHON)


def load(module: str) -> None:
    """Import all that the program of a module imports first.

    Raises SystemExit where that, or what an installation runs in each interpreter, has begun a thread: no fork has it.
    """
    name = f"{module}.__main__"
    importlib.import_module(name)
    del sys.modules[name]
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit(f"{module} cannot be preloaded: something that it imports runs a thread")
    gc.collect()
    gc.freeze()  # a collection in a child touches none of it, so that its pages stay shared


def confine(confined: Mapping[str, Any]) -> None:
    """Put this process into its group, set its limits, and give its rights up. Raises OSError, ValueError."""
    if confined.get("group"):
        join(confined["group"])
    for name, most in (confined.get("limits") or {}).items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (bound, bound))
    user = confined.get("user")
    if user is not None:
        uid, gid, groups = user
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def join(group: str) -> None:
    """Put this process into a control group. Where that cannot be, the attempt is to be tried again."""
    try:
        with open(f"{group}/cgroup.procs", "w") as procs:
            procs.write("0")
    except OSError as error:
        os.write(2, f"cannot join the control group {group}: {error.strerror}\n".encode())
        os._exit(os.EX_TEMPFAIL)


def in_sandbox(outer: int) -> tuple[int | None, list[int]]:
    """Return the program that bubblewrap (`outer`) runs, if it has begun, and all processes of its group with it."""
    parents: dict[int, int] = {}
    group = []
    for pid in descendants(outer):
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parents[pid] = int(fields[1])
        if int(fields[2]) == outer:
            group.append(pid)
    first = next((pid for pid, parent in parents.items() if parent == outer), None)
    inside = [pid for pid in group if pid != first]
    return next((pid for pid in inside if parents[pid] == first), None), inside


def send(child: int, number: int, *, sandboxed: bool, whole_group: bool) -> None:
    """Send a signal to the child, or to its group; to bubblewrap itself while that has not begun the child."""
    targets = [child]
    if sandboxed:
        program, group = in_sandbox(child)
        if program is not None:
            targets = group if whole_group else [program]
    elif whole_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number)
        return
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def watch(child: int, control: int, wakeup: int, *, sandboxed: bool = False) -> int:
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
                    send(child, signal.SIGTERM, sandboxed=sandboxed, whole_group=True)
                elif b"n" in word:
                    send(child, signal.SIGUSR1, sandboxed=sandboxed, whole_group=False)
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


def start_at_end(argv: list[str]) -> int:
    """Start the command of the end, with no input and no output, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(null, target)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.chdir("/")
        os.execve(argv[0], argv, {})
    except OSError:
        pass
    os._exit(127)


def ending(status: int, *, sandboxed: bool) -> dict[str, int | None]:
    """Return the exit code or the signal of a wait status. bubblewrap says 128 + N of a child that signal N has ended.

    143 is what our own program ends with when it is told to stop.
    """
    if os.WIFSIGNALED(status):
        return {"exit": None, "signal": os.WTERMSIG(status)}
    code = os.waitstatus_to_exitcode(status)
    if sandboxed and code - 128 in signal.valid_signals() and code - 128 != signal.SIGTERM:
        return {"exit": None, "signal": code - 128}
    return {"exit": code, "signal": None}


def run_shim(wanted: Mapping[str, Any], descriptors: list[int]) -> bool:
    """Be the shim of one child, in a process of its own, and report how the child ended. True in a preloaded child."""
    confined, at_end = wanted["confined"], wanted["at_end"]
    stdin, stdout, stderr, control, status_fd, env_fd = descriptors[:6]
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for target, source in enumerate((stdin, stdout, stderr)):
        os.dup2(source, target)
        os.close(source)
    with os.fdopen(env_fd, "rb") as stream:
        environment = json.loads(stream.read())
    os.chdir(wanted["cwd"])
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    close = [control, status_fd, wakeup, waker, *descriptors[6:]]
    child = start_child(wanted["argv"], environment, close, confined, preloaded=wanted["preloaded"])
    if not child:
        return True
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    sandboxed = bool(confined.get("sandboxed"))
    status = watch(child, control, wakeup, sandboxed=sandboxed)
    stragglers = kill_tree()
    if at_end:
        os.waitpid(start_at_end(at_end), 0)
    ended = {**ending(status, sandboxed=sandboxed), "stragglers": stragglers}
    with contextlib.suppress(OSError):
        os.write(status_fd, json.dumps(ended).encode() + b"\n")
    return False


def reap(shims: dict[int, list[str]]) -> None:
    """Forget the shims that have ended; kill what was left behind by one that was killed itself."""
    left = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            break
        left = left or pid not in shims or status != 0
        at_end = shims.pop(pid, [])
        if at_end and status != 0:
            shims[start_at_end(at_end)] = []
    for orphan in descendants(os.getpid(), without=shims) if left else ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(orphan, signal.SIGKILL)


def main(socket_fd: int, module: str) -> bool:
    """Fork a shim for every message, until the worker closes the socket. True in a preloaded child."""
    server = socket.socket(fileno=socket_fd)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if module and (names := set_at_start()):
        sys.exit(f"{module} cannot be preloaded: each interpreter of this installation sets {', '.join(names)}")
    _prctl(_PR_SET_DUMPABLE, 0)
    if module:
        load(module)
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    poller = select.poll()
    poller.register(server, select.POLLIN)
    poller.register(wakeup, select.POLLIN)
    shims: dict[int, list[str]] = {}
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if wakeup in ready:
            os.read(wakeup, 4096)
            reap(shims)
        if server.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(server, 200_000, 64)
        if not message:
            return False
        wanted = json.loads(message)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for descriptor in (wakeup, waker):
                os.close(descriptor)
            server.close()
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            status, is_child = 1, False  # what it leaves behind is ended by its parent
            try:
                is_child = run_shim(wanted, descriptors)
                status = 0
            finally:
                if not is_child:
                    os._exit(status)
            return True
        shims[pid] = wanted["at_end"]
        for descriptor in descriptors:
            os.close(descriptor)
        server.send(str(pid).encode())


if __name__ == "__main__":
    _module = "".join(sys.argv[2:])
    if main(int(sys.argv[1]), _module):
        runpy.run_module(_module, run_name="__main__", alter_sys=True)
