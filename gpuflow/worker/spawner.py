"""The processes that fork shims for this worker: started when first needed, started again if they are gone.

One executes what it is told. The others have all imported that a program of ours begins with, an executor or a
function, and their shims fork their children as that program: forty milliseconds less for each, 400 for a function
(docs/decisions/0091-preloaded-children.md).
They end when the worker closes their socket or dies; shims that run then are told by their own pipes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from gpuflow.logs import get_logger

log = get_logger("gpuflow.spawner")

_SHIM: Final = str(Path(__file__).with_name("shim.py"))
#: The forking process answers within this time, or it is taken for dead.
_ANSWER_SECONDS: Final = 20.0
#: One that failed is tried again after so long, in seconds, and twice as long after each further failure, to an hour.
_AGAIN_SECONDS: Final = 60.0
_LONGEST_SECONDS: Final = 3600.0
#: What preloaded children run, by how a new interpreter would run it.
_EXECUTORS: Final = "executors"
_MODULES: Final[Mapping[tuple[str, ...], str]] = {
    (sys.executable, "-P", "-m", *words): words[0]
    for words in ((_EXECUTORS,), ("gpuflow.functions",), ("gpuflow.functions", "session"))
}
#: Variables that the interpreter, the loader and the C library read once, when a program starts; globs.
_READ_AT_START: Final = (
    "PYTHON*",
    "LD_*",
    "GLIBC_*",
    "MALLOC_*",
    "OPENSSL_*",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "LOCPATH",
    "HOME",
    "TZ*",
)
#: In the environment of the one that preloads: where a child's own is shown (`shim.show`).
_ROOM: Final = {"_GPUFLOW_ROOM": 16_384 * " "}
_AT_START: Final = re.compile("|".join(fnmatch.translate(pattern) for pattern in _READ_AT_START))


class Spawner:
    """Forks shims. Safe to use from several threads.

    `interpreter` are the words before the shim's script, `module` what it imports at its start, if anything, and
    `environment` its variables.
    """

    def __init__(
        self, interpreter: Sequence[str], *, module: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.environment = dict(environment or {})
        self._interpreter = list(interpreter)
        self._module = module
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        #: One that preloads is tried once more only where it has worked before.
        self._has_answered = not module
        #: Who waits for its lock is not to find out, too, that it does not answer.
        self.is_given_up = False

    def spawn(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Have a shim forked for a message (`shim`), and return its process id. Raises OSError."""
        text = json.dumps({**message, "preloaded": bool(self._module)}).encode()
        with self._lock:
            if self.is_given_up:
                raise OSError("it is given up")
            has_answered = self._has_answered
            try:
                return self._ask(text, descriptors)
            except OSError:
                self._close(kill=True)  # one that hangs would keep the descriptors it was sent
                if not has_answered:
                    self.is_given_up = bool(self._module)
                    raise
            try:
                return self._ask(text, descriptors)
            except OSError:
                self._close(kill=True)
                self.is_given_up = bool(self._module)
                raise

    def _ask(self, message: bytes, descriptors: Sequence[int]) -> int:
        if self._socket is None:
            self._start()
        if self._socket is None:
            raise OSError("the process that starts children could not be started")
        socket.send_fds(self._socket, [message], list(descriptors))
        answer = self._socket.recv(64)
        if not answer:
            raise OSError("the process that starts children has gone")
        self._has_answered = True
        return int(answer)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = [self._module] if self._module else []
        try:
            self._process = subprocess.Popen(
                [*self._interpreter, _SHIM, str(theirs.fileno()), *module],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**self.environment, **_ROOM} if self._module else self.environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(_ANSWER_SECONDS)
        self._socket = ours

    @property
    def pid(self) -> int | None:
        """Return the process that forks; None while there is none."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End it; what it has forked goes on."""
        with self._lock:
            self._close()

    def _close(self, *, kill: bool = False) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            if kill:
                self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
            self._process = None


class Spawners:
    """All of them. Safe to use from several threads."""

    def __init__(self) -> None:
        self._plain = Spawner([sys.executable, "-I", "-S"])
        self._preloading = {module: _Preloading(module) for module in _MODULES.values()}

    def spawn(
        self,
        argv: Sequence[str],
        cwd: Path,
        descriptors: Sequence[int],
        *,
        environment: Mapping[str, str],
        at_end: Sequence[str] = (),
        confined: Mapping[str, Any] | None = None,
    ) -> int:
        """Start a shim that runs `argv` in `cwd`; return its process id. Raises OSError.

        `descriptors` are stdin, stdout, stderr, control, status, environment, and any to be held open; `environment` is
        what will be written to the last of these; `at_end` is a command that the shim runs when nothing of the tree is
        left; `confined` what the child may not (`shim`).
        """
        message = {"argv": list(argv), "cwd": str(cwd), "at_end": list(at_end), "confined": dict(confined or {})}
        preloading = self._preloading_for(argv, confined or {})
        shim = None if preloading is None else preloading.spawn(message, descriptors, environment)
        return self._plain.spawn(message, descriptors) if shim is None else shim

    def _preloading_for(self, argv: Sequence[str], confined: Mapping[str, Any]) -> _Preloading | None:
        """Return what has this program loaded; None where it is to be a new one.

        A child of another user has to be: what a loaded one has in its memory is not for that user.
        """
        module = _MODULES.get(tuple(argv))
        return None if module is None or confined.get("user") is not None else self._preloading[module]

    @property
    def preloaded_pid(self) -> int | None:
        """Return the process that forks preloaded children of executors; None while there is none."""
        return self._preloading[_EXECUTORS].pid

    def close(self) -> None:
        """End them; what they have forked goes on."""
        self._plain.close()
        for one in self._preloading.values():
            one.close()


class _Preloading:
    """Forks shims whose children are one program, of the version that is installed, as long as that works."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._spawner: Spawner | None = None
        self._of_installation: tuple[object, ...] = ()
        self._failures = 0
        self._again_at = 0.0 if sys.platform == "linux" else float("inf")  # monotonic seconds

    @property
    def pid(self) -> int | None:
        return self._spawner.pid if self._spawner is not None else None

    def spawn(
        self, message: Mapping[str, Any], descriptors: Sequence[int], environment: Mapping[str, str]
    ) -> int | None:
        """Have a shim forked, and return its process id; None where a new interpreter is to be started."""
        spawner = self._for(environment)
        if spawner is None:
            return None
        try:
            shim = spawner.spawn(message, descriptors)
        except OSError as error:
            self._give_up(spawner, str(error))
            return None
        self._failures = 0
        return shim

    def close(self) -> None:
        if self._spawner is not None:
            self._spawner.close()

    def _give_up(self, spawner: Spawner, cause: str) -> None:
        """Do without preloaded children for a while: what failed may pass (no memory, too many processes), or not."""
        with self._lock:
            if self._spawner is not spawner:
                return
            self._spawner = None
            seconds = min(_AGAIN_SECONDS * 2 ** min(self._failures, 10), _LONGEST_SECONDS)
            self._failures += 1
            self._again_at = time.monotonic() + seconds
        log.warning("preload_failed", cause=cause, again_seconds=round(seconds))

    def _for(self, environment: Mapping[str, str]) -> Spawner | None:
        """Return the one whose process can become this program; None where a new interpreter would be another.

        Where another version was installed meanwhile, another process is started: a child is of one version, as ever.
        """
        at_start = {name: value for name, value in environment.items() if _AT_START.match(name)}
        with self._lock:
            if time.monotonic() < self._again_at:
                return None
            installed = _installed()
            if self._spawner is not None and installed != self._of_installation:
                log.info("preloaded_anew", why="the installation of gpuflow has changed")
                self._spawner.close()
                self._spawner = None
            if self._spawner is None:
                self._of_installation = installed
                self._spawner = Spawner([sys.executable, "-P"], module=self._module, environment=at_start)
            return self._spawner if self._spawner.environment == at_start else None


@cache
def packages() -> tuple[Path, ...]:
    """Return the folders of the packages that each child imports."""
    found = (find_spec(name) for name in ("gpuflow", _EXECUTORS))
    return tuple(Path(one.origin).parent for one in found if one is not None and one.origin)


def _installed() -> tuple[object, ...]:
    """Return what is another after a package was installed beside ours, or in its place (pip makes a folder anew).

    The time of a package's own folder does not count: the first child writes compiled modules there.
    """
    marks: list[object] = []
    for package in packages():
        try:
            own, around = package.stat(), package.parent.stat()
        except OSError:
            marks.append(None)
        else:
            marks.append((own.st_dev, own.st_ino, around.st_dev, around.st_ino, around.st_mtime_ns))
    return tuple(marks)


@cache
def spawner() -> Spawners:
    """Return the spawners of this process."""
    return Spawners()
