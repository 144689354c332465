"""A proxy to the broker by which the server answers an error to each kind of command, as often as a test wants.

A command that is to be refused is changed, on its way, into one that does nothing and answers the error: so the answer
stands in its place among the others.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from tests.chaos.proxy import Proxy

#: What a server does not refuse so: they set a connection up, or change what it is for.
_PASSED = frozenset(
    {"HELLO", "AUTH", "SELECT", "CLIENT", "PING", "SUBSCRIBE", "PSUBSCRIBE", "UNSUBSCRIBE", "PUNSUBSCRIBE"}
)
_REFUSE = "return redis.error_reply(ARGV[1])"


class RefusingProxy(Proxy):
    """Refuses nothing until `begin`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.refused: Counter[str] = Counter()
        self._answer = ""
        self._times = 0
        self._counting = threading.Lock()

    def begin(self, answer: str, times: int) -> None:
        """Answer so to each kind of command, so many times."""
        with self._counting:
            self.refused.clear()
            self._answer, self._times = answer, times

    def end(self) -> None:
        """Refuse nothing any more."""
        with self._counting:
            self._answer = ""

    def changes(self) -> Callable[[bytes], bytes]:
        return _Requests(self._is_refused).changed

    def _is_refused(self, kind: str) -> str:
        """Return the answer to this command, "" where the server gives its own."""
        with self._counting:
            if not self._answer or self.refused[kind] >= self._times:
                return ""
            self.refused[kind] += 1
            return self._answer


class _Requests:
    """What one connection asks, cut into commands (RESP arrays of bulk strings)."""

    def __init__(self, refuses: Callable[[str], str]) -> None:
        self._refuses = refuses
        self._bytes = b""
        #: The error that a transaction is to end with; "" for one that passes; None outside of one.
        self._transaction: str | None = None

    def changed(self, chunk: bytes) -> bytes:
        self._bytes += chunk
        out = []
        while (end := self._end_of_first()) is not None:
            request, self._bytes = self._bytes[:end], self._bytes[end:]
            out.append(self._one(request))
        return b"".join(out)

    def _one(self, request: bytes) -> bytes:
        parts = request.split(b"\r\n")
        name = parts[2].decode().upper()
        kind = f"{name} {parts[4].decode()[:8]}" if name in ("EVALSHA", "SCRIPT") else name
        if name == "MULTI":
            self._transaction = self._refuses(name)
        if self._transaction is None:
            answer = "" if name in _PASSED else self._refuses(kind)
            return _request("EVAL", _REFUSE, "0", answer) if answer else request
        answer = self._transaction
        if name in ("EXEC", "DISCARD"):
            self._transaction = None
            return _request("EVAL", _REFUSE, "0", answer) if answer else request
        # Of one that is refused nothing comes to the server, and its client hears what it would hear.
        return _request("ECHO", "OK" if name == "MULTI" else "QUEUED") if answer else request

    def _end_of_first(self) -> int | None:
        """Return where the first command ends; None: it is not all there yet."""
        line = self._bytes.find(b"\r\n")
        if line < 0:
            return None
        assert self._bytes[:1] == b"*", self._bytes[:80]
        at = line + 2
        for _ in range(int(self._bytes[1:line])):
            line = self._bytes.find(b"\r\n", at)
            if line < 0:
                return None
            at = line + 2 + int(self._bytes[at + 1 : line]) + 2
        return at if at <= len(self._bytes) else None


def _request(*parts: str) -> bytes:
    found = [f"*{len(parts)}"]
    for part in parts:
        found += [f"${len(part.encode())}", part]
    return ("\r\n".join(found) + "\r\n").encode()
