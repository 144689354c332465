"""An HTTP server on loopback that means harm: endless, compressed, dripping and circling answers."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import zlib
from collections.abc import Callable

from tests.support.waiting import patient

#: Seconds between two bytes of an answer that drips.
_DRIP_SECONDS = 0.02
_ZEROS = bytes(64 << 10)
_PROBLEM = b"HTTP/1.1 500 No\r\nContent-Type: application/problem+json\r\n"


@functools.cache
def bomb() -> bytes:
    """Return the beginning of a problem document that gzip blows up to 256 MiB."""
    packing = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packing.compress(b'{"detail": "') + b"".join(packing.compress(_ZEROS) for _ in range(4096)) + packing.flush()


class HostilePeer:
    """Answers by path; a context manager. `asked` are the paths of all requests."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[str] = []
        self.sent = 0
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._take, daemon=True)]
        self._answers: dict[str, Callable[[socket.socket], None]] = {
            "/endless": self._endless,
            "/large": lambda line: self._send(line, b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000\r\n\r\n"),
            "/bomb": self._bomb,
            "/endless-error": self._endless_error,
            "/drip": self._drip,
            "/drip-header": self._drip_header,
            "/loop": self._loop,
            "/length": lambda line: self._send(
                line, b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"
            ),
            "/nested": lambda line: self._send(line, _PROBLEM + b"Connection: close\r\n\r\n" + b"[" * 60_000),
        }

    def __enter__(self) -> HostilePeer:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(timeout=patient(30))

    def _take(self) -> None:
        while True:
            try:
                line = self._listener.accept()[0]
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(line,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            line.settimeout(1)
            words = line.recv(65_536).split(b" ")
            if len(words) < 2:
                return
            path = words[1].decode().split("?")[0]
            self.asked.append(path)
            self._answers["/" + path.split("/")[1]](line)

    def _send(self, line: socket.socket, content: bytes) -> None:
        view = memoryview(content)
        while view and not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                sent = line.send(view)
                self.sent += sent
                view = view[sent:]

    def _endless(self, line: socket.socket) -> None:
        self._send(line, b"HTTP/1.1 200 OK\r\n\r\n")
        while not self._ending.is_set():
            self._send(line, _ZEROS)

    def _endless_error(self, line: socket.socket) -> None:
        self._send(line, _PROBLEM + b"\r\n" + b'{"detail": "')
        while not self._ending.is_set():
            self._send(line, b"x" * len(_ZEROS))

    def _bomb(self, line: socket.socket) -> None:
        content = bomb()
        length = str(len(content)).encode()
        self._send(line, _PROBLEM + b"Content-Encoding: gzip\r\nContent-Length: " + length + b"\r\n\r\n" + content)

    def _drip(self, line: socket.socket) -> None:
        self._send(line, b"HTTP/1.1 200 OK\r\n\r\n")
        while not self._ending.wait(_DRIP_SECONDS):
            self._send(line, b"x")

    def _drip_header(self, line: socket.socket) -> None:
        self._send(line, b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not self._ending.wait(_DRIP_SECONDS):
            self._send(line, b"x")

    def _loop(self, line: socket.socket) -> None:
        self._send(line, b"HTTP/1.1 302 Found\r\nLocation: /loop\r\n\r\n")
        while not self._ending.is_set():
            self._send(line, _ZEROS)
