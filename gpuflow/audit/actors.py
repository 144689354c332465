"""Who acts: `user@host`, `token:ID ADDRESS`, `gateway:ADDRESS` (the fleet's own token), `flower:USER ADDRESS`,
`worker:ID`, `beat:HOST` or `autoscaler`.

A gateway sets the actor of each request (`act_as`), a worker or beat that of its process (`acts_as_process`);
everywhere else it is the user of this process. It is what the process says: whoever holds the broker's password could
say another.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import socket
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from gpuflow.terminal import one_line

#: The longest name of an actor or target, in characters.
MOST_CHARACTERS: Final = 200

_acting: ContextVar[str] = ContextVar("gpuflow_audit_actor", default="")


class _Process:
    actor = ""


def actor_here() -> str:
    """Return who acts in this context."""
    return _acting.get() or _Process.actor or user_here()


def act_as(actor: str) -> None:
    """Say who acts from now on in this context: in this task of an event loop, and the threads that it asks."""
    _acting.set(one_line(actor, MOST_CHARACTERS))


def acts_as_process(actor: str) -> None:
    """Say who acts in this process where no context says otherwise."""
    _Process.actor = one_line(actor, MOST_CHARACTERS)


@contextlib.contextmanager
def acting(actor: str) -> Iterator[None]:
    """Act as `actor` inside a block."""
    token = _acting.set(one_line(actor, MOST_CHARACTERS))
    try:
        yield
    finally:
        _acting.reset(token)


@functools.cache
def user_here() -> str:
    """Return `user@host`: by the number of the user where there is one, since the environment may say anything."""
    return one_line(f"{_user()}@{socket.gethostname()}", MOST_CHARACTERS)


def _user() -> str:
    try:
        import os
        import pwd

        uid = os.getuid()
    except (ImportError, AttributeError):  # Windows
        try:
            return getpass.getuser()
        except (OSError, KeyError, ImportError):
            return "unknown"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
