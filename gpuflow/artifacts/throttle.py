"""Paces the transfers of a process: the cap of WORKER_NETWORK_BANDWIDTH_BYTES_PER_SEC. It opens no file and no socket.

Called by the stores, block by block. All transfers of a process that have the same cap share one throttle.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Final

#: Bytes that a transfer reads or sends at a time, where no cap asks for less.
BLOCK_BYTES: Final = 1 << 20
_SMALLEST_BLOCK_BYTES: Final = 512
_BLOCKS_PER_SECOND: Final = 20
#: Unused allowance that may be caught up on, in seconds of the cap: it makes good what the transfer of a block itself
#: takes, so it is longer than a block.
_CREDIT_SECONDS: Final = 0.1


class Throttle:
    """Lets `bytes_per_second` bytes pass, over all threads that call `wait_for_bytes`; None lets all pass at once."""

    def __init__(
        self,
        bytes_per_second: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._paid_until = clock()

    @property
    def block_bytes(self) -> int:
        """Return the size of the blocks to ask for: a twentieth of a second of the cap, at most 1 MiB."""
        if self.bytes_per_second is None:
            return BLOCK_BYTES
        return min(BLOCK_BYTES, max(_SMALLEST_BLOCK_BYTES, self.bytes_per_second // _BLOCKS_PER_SECOND))

    def wait_for_bytes(self, count: int) -> None:
        """Wait until `count` more bytes may pass."""
        if self.bytes_per_second is None or count <= 0:
            return
        with self._lock:
            now = self._clock()
            self._paid_until = max(self._paid_until, now - _CREDIT_SECONDS) + count / self.bytes_per_second
            wait_seconds = self._paid_until - now
        if wait_seconds > 0:
            self._sleep(wait_seconds)


@functools.cache
def shared_throttle(bytes_per_second: int | None) -> Throttle:
    """Return the throttle of this process for a cap."""
    return Throttle(bytes_per_second)
