"""A TCP proxy on loopback between a worker and its broker, for tests that cut the line between them.

It passes bytes and knows nothing of them. `cut()` ends every connection at once, both ways, and new ones are welcome;
`refuse()` ends them and turns new ones away until `allow()`; `stall()` keeps them and passes nothing until then, as a
line does that drops all packets; `lose_answers()` passes on what is asked and drops what is answered, until `cut()`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Self
from urllib.parse import urlsplit

_CHUNK_BYTES = 65_536


class Proxy:
    """Listens on a port of its own and passes everything on to the broker of `url`. A context manager."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        login, _, _ = parts.netloc.rpartition("@")
        self.url = parts._replace(netloc=f"{login}@127.0.0.1:{port}").geturl()
        self.cuts = 0
        self.connections = 0
        self._open = True
        self._flows = threading.Event()
        self._flows.set()
        self._loses = False
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._half_ended: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> int:
        """End every connection with a reset; return how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
            self._half_ended.clear()
            self._loses = False
        for pair in pairs:
            for end in pair:
                _reset(end)
        self.cuts += len(pairs)
        return len(pairs)

    def refuse(self) -> None:
        """End every connection, and turn away those that come."""
        self._open = False
        self.cut()

    def stall(self) -> None:
        """Pass nothing on, and say nothing."""
        self._flows.clear()

    def lose_answers(self) -> None:
        """Drop what the broker answers."""
        self._loses = True

    def allow(self) -> None:
        """Let everything through again."""
        self._open = True
        self._flows.set()

    def changes(self) -> Callable[[bytes], bytes]:
        """Return what changes the bytes of one connection on their way to the broker; here nothing does."""
        return bytes

    def close(self) -> None:
        self._open = False
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self._open:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                _reset(client)
                continue
            pair = (client, server)
            with self._lock:
                self._pairs.add(pair)
                self.connections += 1
            if not self._open:
                self.cut()
            for source, sink in (pair, pair[::-1]):
                threading.Thread(target=self._pass, args=(pair, source, sink), name="proxy", daemon=True).start()

    def _pass(self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket) -> None:
        changed = self.changes() if source is pair[0] else bytes
        try:
            while chunk := source.recv(_CHUNK_BYTES):
                self._flows.wait()
                if not (self._loses and source is pair[1]):
                    sink.sendall(changed(chunk))
            # The end of one way is passed on as what it is: a reset would take what the other side has not read yet.
            self._flows.wait()
            sink.shutdown(socket.SHUT_WR)
            ended = True
        except OSError:
            ended = False
        with self._lock:
            one_way = ended and pair in self._pairs and pair not in self._half_ended
            if one_way:
                self._half_ended.add(pair)
            ours = not one_way and pair in self._pairs
            if not one_way:
                self._pairs.discard(pair)
                self._half_ended.discard(pair)
        if ours:
            for end in pair:
                end.close() if ended else _reset(end)


def _reset(end: socket.socket) -> None:
    """Close a socket with RST, and wake the thread that reads from it."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        end.shutdown(socket.SHUT_RDWR)
    end.close()
