"""How the programs of this library load modules, and end: without a search for garbage that is not there.

What a module makes stays, so the collector looks in vain through hundreds of thousands of new objects: a fifth of the
time in which a worker or a command starts, a quarter where torch is loaded. At its end Python looks through all of them
again, several times, only to hand the memory of a process back that is gone a moment later.
"""

from __future__ import annotations

import atexit
import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Final

#: The kinds of open files that hold back what was written.
_BUFFERED: Final = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


@contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage in this block, which imports modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load(name: str) -> ModuleType:
    """Return the module of that name. Raises what its import raises."""
    with loading():
        return import_module(name)


def load_checker() -> None:
    """Load what checks templates, which a command does when it first needs it.

    For processes that run for weeks: the files may have been replaced by an upgrade by the time it is needed.
    """
    load("gpuflow.spec.parsing")


def end_quickly() -> None:
    """Have this process look for no garbage at its end, once all that is registered for that has run.

    Files that are still open are flushed. What else stands in cycles of objects (all that a module holds does) is not
    finalised any more, as the language allows; so this is for programs whose code is ours.
    """
    atexit.register(_end)


def _end() -> None:
    for one in gc.get_objects():
        # By its type: a proxy answers for what it stands for, or is dead.
        if issubclass(type(one), _BUFFERED):
            with suppress(Exception):
                one.flush()
    gc.freeze()
