"""Keeps all Python code of a child from metadata services and link-local addresses, whatever leads it there.

The libraries of the hub, of trackers and of data sets connect by themselves and follow redirects. What native code
connects to is not seen; `connecting` judges gpuflow's own requests by the whole policy.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

from gpuflow.errors import NotAllowed
from gpuflow.policy.hosts import never_refusal


class Unreachable(NotAllowed, PermissionError):
    """A connection that is refused; to a library that only asks whether such a service is there, it is not."""


class _Guard:
    is_on = False


def guard_connections() -> None:
    """Refuse such connections of this process from now on, with NotAllowed. It cannot be undone."""
    if not _Guard.is_on:
        _Guard.is_on = True
        sys.addaudithook(_audit)


def _audit(event: str, given: tuple[Any, ...]) -> None:
    if event not in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        return
    connection, address = given
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or not isinstance(address, tuple):
        return
    host = address[0].decode("utf-8", "replace") if isinstance(address[0], bytes | bytearray) else str(address[0])
    for found in _addresses(host):
        refusal = never_refusal(host, found)
        if refusal is not None:
            raise Unreachable(refusal.message, refusal.setting)


def _addresses(host: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    except (OSError, UnicodeError):
        return []
