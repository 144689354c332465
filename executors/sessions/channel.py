"""What a session says: event lines on its stdout, those of a request with its `id`; and what it hears, on stdin.

Every line is one write under one lock, whichever thread it comes from. Used by `serving` alone; engines and requests
see only an `Emitter`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from executors.base import plain
from executors.sessions.lines import MAX_BYTES, BadLine, too_long
from gpuflow import protocol
from gpuflow.protocol import Emitter

#: Called with each line; None at the end of the input, the refusal of a line that was too long.
Hear = Callable[[bytes | BadLine | None], None]
#: How much of a line that is too long is read at once, in bytes.
_PASSED_OVER = 1 << 20


class RequestEmitter(protocol.RequestEmitter):
    """Tells the events of one request; its result value as strict JSON can hold it."""

    def result(self, value: Any) -> None:
        """Give the result value."""
        super().result(plain(value))


class SessionEmitter(Emitter):
    """Tells the events of the session itself. A reader that has gone is told of by `gone`, once, and harms nothing."""

    gone: Callable[[], None] | None = None

    def emit(self, name: str, /, **data: Any) -> None:
        """Write one event."""
        try:
            super().emit(name, **data)
        except (OSError, ValueError):  # ValueError: the stream is closed
            told, self.gone = self.gone, None
            if told is not None:
                told()


def listen(stream: BinaryIO, hear: Hear) -> None:
    """Pass on each line of `stream` from a thread of its own, to the end."""

    def read() -> None:
        while line := stream.readline(MAX_BYTES):
            if len(line) == MAX_BYTES and not line.endswith(b"\n"):
                refusal = too_long(line)
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_PASSED_OVER)
                hear(refusal)
            elif line.strip():
                hear(line)
        hear(None)

    threading.Thread(target=read, name="gpuflow-session-stdin", daemon=True).start()
