"""A child as `python -m executors`, to which something happens: `faulty_child.py FAULT EVENT`, at the first such event.

So every executor meets the same accidents in its work, without a line for them in its own code.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from gpuflow.protocol import Emitter

HANGING = "the child hangs now"
_GARBAGE = (
    b"plain text\n",
    b"\xff\xfe\x00\n",
    b'{"event": "progress"\n',
    b'{"event": "finish"}\n',
    b"x" * 50_000 + b"\n",
)


def litter(emitter: Emitter) -> None:
    """Print to where the events go, and leave a process behind."""
    print("a library prints")
    for line in _GARBAGE:
        os.write(emitter._stream.fileno(), line)
    subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"], start_new_session=True)


def crash(_: Emitter) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def memory(_: Emitter) -> None:
    """Run into a real limit of the memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), resource.RLIM_INFINITY))
    bytearray(1 << 30)


def cuda(_: Emitter) -> NoReturn:
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.58 GiB")


def slow(_: Emitter) -> None:
    time.sleep(3600)


def hang(_: Emitter) -> NoReturn:
    """Say no more and hear nothing, as a deadlock in a library does."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    print(HANGING, file=sys.stderr, flush=True)
    while True:
        time.sleep(3600)


def contradict(emitter: Emitter) -> NoReturn:
    emitter.finish("completed")
    os._exit(3)


def leave(_: Emitter) -> NoReturn:
    os._exit(0)


FAULTS = {f.__name__: f for f in (litter, crash, memory, cuda, slow, hang, contradict, leave)}

#: Those that no code of an executor could catch or answer to.
AT_ONCE = frozenset({"crash", "hang", "contradict", "leave"})


def main() -> int:
    fault, event = (FAULTS[sys.argv[1]], sys.argv[2]) if len(sys.argv) > 1 else (None, "")
    emit = Emitter.emit
    struck = False

    def strike(self: Emitter, name: str, **data: Any) -> None:
        nonlocal struck
        emit(self, name, **data)
        if name == event and fault is not None and not struck:
            struck = True
            fault(self)

    Emitter.emit = strike  # type: ignore[method-assign]
    from executors.__main__ import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
