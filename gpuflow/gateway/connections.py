"""Connections to the gateway: how many there may be, and how long one may take to say what it wants.

uvicorn waits for a request's headers without end. Here every connection owes whole headers within HEADER_SECONDS of its
begin, and of the end of each answer: a client that sends a byte now and then gains nothing. Where all places are taken,
the connection that has owed its request for the longest time makes way: first one of the same address, so that clients
which hold connections open push each other out, not those that work.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from gpuflow.gateway.peers import Peers, group_of
from gpuflow.logs import get_logger

#: How long the headers of a request may take, in seconds.
HEADER_SECONDS: Final = 10.0
#: The headers of one request, in bytes.
MAX_HEADER_BYTES: Final = 32_768
#: Files that the gateway has open beside its connections.
_OTHER_FILES: Final = 512

_log = get_logger("gpuflow.gateway")


class Connections:
    """All connections of one gateway. Used in one event loop."""

    def __init__(
        self, *, most: int, most_per_address: int, peers: Peers, header_seconds: float = HEADER_SECONDS
    ) -> None:
        self.header_seconds = header_seconds
        self._most = most
        self._most_per_address = most_per_address
        self._peers = peers
        self._places: dict[Any, str] = {}
        self._counts: Counter[str] = Counter()
        #: Those that owe a request, the longest first.
        self._owing: dict[Any, None] = {}

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, connection: Guarded, address: str) -> bool:
        """Give a connection a place, that of one which owes its request where none is free; say whether it has one."""
        key = group_of(address)
        if not self._peers.trusts(address) and self._counts[key] >= self._most_per_address and not self._evict(key):
            return False
        if len(self._places) >= self._most and not self._evict(None):
            return False
        self._places[connection] = key
        self._counts[key] += 1
        return True

    def leave(self, connection: Guarded) -> None:
        """Take a connection's place. May be called twice."""
        self._owing.pop(connection, None)
        key = self._places.pop(connection, None)
        if key is not None:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]

    def owes(self, connection: Guarded) -> None:
        """Note that a connection owes its next request from now on."""
        if connection in self._places:
            self._owing[connection] = None

    def has_asked(self, connection: Guarded) -> None:
        """Note that a whole request has come."""
        self._owing.pop(connection, None)

    def _evict(self, key: str | None) -> bool:
        owing = [each for each in self._owing if key is None or self._places[each] == key]
        # Those that have never sent a request first: a client that rests between two is a client.
        victim = next((each for each in owing if not each.is_served), owing[0] if owing else None)
        if victim is None:
            return False
        self.leave(victim)
        victim.abort()
        return True


class Guarded(H11Protocol):
    """uvicorn's HTTP protocol, with a place in `table` and a deadline for the headers of each request."""

    table: Connections
    #: Whether a whole request of this connection has been answered.
    is_served = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, or answer 503 and close."""
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        if self.table.enter(self, self.client[0] if self.client else ""):
            self._watch()
        else:
            self._leave_with(b"503 Service Unavailable", b"Retry-After: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self._stop_watch()
        self.table.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read, unless the connection is to be closed."""
        if not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        """Expect the next request within the deadline."""
        self._stop_watch()
        self.is_served = True
        super().on_response_complete()
        self._watch()

    def abort(self) -> None:
        """End the connection at once."""
        self._stop_watch()
        self.transport.abort()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watch()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.table.header_seconds, self._late)
            self.table.owes(self)

    def _stop_watch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self.table.has_asked(self)

    def _late(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.close()  # what is still on its way to a slow reader goes out first
        else:
            self._leave_with(b"408 Request Timeout", b"")

    def _leave_with(self, status: bytes, header: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 " + status + b"\r\n" + header + b"Connection: close\r\nContent-Length: 0\r\n\r\n"
        )
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Write nothing: any client can ask for an upgrade."""


def guarded(table: Connections) -> type[Guarded]:
    """Return the protocol class for uvicorn's setting `http`."""
    return type("GuardedProtocol", (Guarded,), {"table": table})


def allow_files(most_connections: int) -> int:
    """Let this process open a file for each connection, as far as the system allows; return for how many it does."""
    if sys.platform == "win32":
        return most_connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most_connections + _OTHER_FILES
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        _log.warning("few_open_files", allowed=soft, wanted=wanted)
    return min(most_connections, max(soft - _OTHER_FILES, soft // 2))


__all__ = ["HEADER_SECONDS", "MAX_HEADER_BYTES", "Connections", "Guarded", "allow_files", "guarded"]
