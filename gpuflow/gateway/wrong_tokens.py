"""Counts wrong tokens for each address, logs them, and says when an address has had its share. Pure but for the clock.

An address from which the right token has come is never locked out: a stranger behind the same address (another user of
this machine, a worker with an old token) cannot keep the others from working. Of an address that has had its share,
tokens of the store, which nobody can guess, are looked up at a bounded rate, so that a right one gets in.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gpuflow.gateway.peers import group_of
from gpuflow.logs import get_logger

#: Wrong tokens that one address may send at once, and how many a second after that.
BURST: Final = 20.0
PER_SECOND: Final = 0.5
#: Tokens that are looked up for an address that has had its share, at once and a second: a right one gets in by that.
LOOKUP_BURST: Final = 5.0
LOOKUPS_PER_SECOND: Final = 1.0
#: One line of the log for each address in so many seconds.
_LOG_SECONDS: Final = 10.0
#: Addresses that are remembered; the one that was quiet for the longest time is forgotten first.
_MOST_ADDRESSES: Final = 8192
_MOST_PATH: Final = 200
#: Addresses whose wrong tokens are counted for the audit log by themselves, between two of its entries.
MOST_AUDITED: Final = 20
OTHERS: Final = "others"

_log = get_logger("gpuflow.gateway")


@dataclass(kw_only=True)
class _Address:
    left: float
    at: float
    lookups: float = LOOKUP_BURST
    proven: bool = False
    unlogged: int = 0
    logged_at: float | None = None


class WrongTokens:
    """The addresses, and what each has left. Used in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()
        self._unaudited: Counter[str] = Counter()

    def wait_seconds(self, address: str) -> float:
        """Return how long an address has to wait before it is heard again; 0: it is heard now."""
        found = self._entry(address)
        return 0.0 if found.left >= 1 else (1 - found.left) / PER_SECOND

    def may_look_up(self, address: str) -> bool:
        """Say whether a token is looked up for an address that is not heard now, and count that."""
        found = self._entry(address)
        if found.lookups < 1:
            return False
        found.lookups -= 1
        return True

    def proven(self, address: str) -> bool:
        """Say whether the right token has come from there."""
        return self._entry(address).proven

    def note_right(self, address: str) -> None:
        """Remember that the right token has come from there."""
        self._entry(address).proven = True

    def note_wrong(self, address: str, path: str) -> None:
        """Count a wrong token, which stands in no log."""
        found = self._entry(address)
        found.left = max(0.0, found.left - 1)
        found.unlogged += 1
        known = address in self._unaudited or len(self._unaudited) < MOST_AUDITED
        self._unaudited[address if known else OTHERS] += 1
        if found.logged_at is None or found.at - found.logged_at >= _LOG_SECONDS:
            _log.warning("wrong_token", client=address, path=path[:_MOST_PATH], times=found.unlogged)
            found.unlogged, found.logged_at = 0, found.at

    def take_unaudited(self) -> dict[str, int]:
        """Return how many wrong tokens each address has sent since the last call; `OTHERS`: all beyond the cap."""
        found, self._unaudited = dict(self._unaudited), Counter()
        return found

    def put_back(self, counts: Mapping[str, int]) -> None:
        """Take back counts that could not be written, to be taken again."""
        self._unaudited.update(counts)

    def _entry(self, address: str) -> _Address:
        key, now = group_of(address), self._clock()
        found = self._addresses.get(key)
        if found is None:
            while len(self._addresses) >= _MOST_ADDRESSES:
                self._addresses.popitem(last=False)
            found = self._addresses[key] = _Address(left=BURST, at=now)
        self._addresses.move_to_end(key)
        found.left = min(BURST, found.left + (now - found.at) * PER_SECOND)
        found.lookups = min(LOOKUP_BURST, found.lookups + (now - found.at) * LOOKUPS_PER_SECOND)
        found.at = now
        return found
