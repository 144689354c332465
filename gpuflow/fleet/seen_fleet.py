"""What the live workers can do, as it was a moment ago: for who submits much and need not know better.

Reading the registry costs two commands for each worker; a submit must not. Used by `gpuflow.submission`. Whoever must
know what is true now reads `fleet.registry`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import redis

from gpuflow.broker.keys import Keys
from gpuflow.fleet.registry import Fleet
from gpuflow.routing.capability import Capability

#: The registry is read again after this many seconds,
FRESH_SECONDS: Final = 1.0
#: and after so many times what reading it took: of a large fleet, at most a twentieth of a submitter's time goes there.
READ_SHARE: Final = 20.0


@dataclass(kw_only=True)
class _Seen:
    """What was read last."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    capabilities: list[Capability] = field(default_factory=list)
    good_until: float = float("-inf")


_seen: weakref.WeakKeyDictionary[redis.Redis, _Seen] = weakref.WeakKeyDictionary()


class SeenFleet:
    """What this process has seen of the fleet behind a client. Safe in threads. `clock` tells seconds."""

    def __init__(self, client: redis.Redis, keys: Keys, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = Fleet(client, keys)
        self._clock = clock
        self._seen = _seen.setdefault(client, _Seen())

    def capabilities(self) -> list[Capability]:
        """Return what each live worker can do. Raises redis errors."""
        seen = self._seen
        with seen.lock:
            begun = self._clock()
            if begun >= seen.good_until:
                seen.capabilities = self._fleet.capabilities()
                ended = self._clock()
                seen.good_until = ended + max(FRESH_SECONDS, READ_SHARE * (ended - begun))
            return seen.capabilities

    def has_gpu(self) -> bool:
        """Whether a live worker has a GPU. Raises redis errors."""
        return any(capability.gpus for capability in self.capabilities())
