"""What the task of this process may read and reach, as its request says; a request without a policy has no limits.

Set by the entry points, asked where a path is opened or a host is called. A session serves requests of several tasks:
what one of them may read counts for the process; the worker has judged each of them by its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from executors.base import bad_input
from gpuflow.policy.child import read_policy
from gpuflow.policy.guarding import guard_connections
from gpuflow.policy.hosts import Hosts
from gpuflow.policy.roots import Opened, Roots, opened, readable
from gpuflow.protocol import Request

_roots: Roots | None = None
_hosts: Hosts | None = None


def use(request: Request) -> None:
    """Take over the limits of a request. Raises ExecutorError: BadInput for what are none."""
    global _roots, _hosts
    if request.policy is None:
        return
    try:
        roots, hosts = read_policy(request.policy)
    except (KeyError, TypeError, ValueError) as error:
        raise bad_input(f"the request has a policy that cannot be read: {error}") from error
    guard_connections()
    before = _roots.own if _roots else ()
    _roots, _hosts = replace(roots, own=tuple(dict.fromkeys((*before, *roots.own)))), hosts


def hosts() -> Hosts | None:
    """Return what may be reached; None: everything."""
    return _hosts


@contextlib.contextmanager
def reading(path: str | Path, field: str) -> Iterator[Opened]:
    """Open a file or folder that the task names, for the block. Raises NotAllowed, OSError."""
    with opened(path, _roots, field=field) as found:
        yield found


def folder(path: str | Path, field: str) -> Path:
    """Return the real path of what a library opens by itself; as it is where it is not there. Raises NotAllowed."""
    try:
        return readable(path, _roots, field=field)
    except (OSError, RuntimeError):
        return Path(path).expanduser()
