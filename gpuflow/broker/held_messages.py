"""Which messages workers hold, and which nobody holds any more. Read-only; for all who show it or count on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.broker.keys import Keys
from gpuflow.broker.priorities import priority_of, queue_of
from gpuflow.broker.sweeper import MAX_SWEEP_GAP_SECONDS

#: A lease that nobody has swept, as nobody is there, is none any more so many seconds after its end.
UNSWEPT_SECONDS: Final = MAX_SWEEP_GAP_SECONDS


def live_leases(client: Any, keys: Keys, tags: Sequence[str]) -> dict[str, str]:
    """Return the owner tokens of those of the delivery tags that somebody holds. Raises redis errors."""
    if not tags:
        return {}
    pipe = client.pipeline(transaction=False)
    pipe.time()
    pipe.zmscore(keys.leases, list(tags))
    pipe.hmget(keys.owners, list(tags))
    (seconds, micros), ends, owners = pipe.execute()
    ended = seconds + micros / 1e6 - UNSWEPT_SECONDS
    held = zip(tags, ends, owners, strict=True)
    return {tag: str(owner).partition("\n")[0] for tag, end, owner in held if owner and end is not None and end > ended}


@dataclass(frozen=True, kw_only=True)
class HeldLease:
    """A message that a worker took; unless `is_live` nobody holds it any more, and it waits but for a sweep.

    `owner` is the token of the process that took it.
    """

    worker: str
    owner: str
    queue: str
    priority: int
    is_live: bool


def held_leases(client: Any, keys: Keys) -> list[HeldLease]:
    """Return every leased message, at one moment. Raises redis errors."""
    pipe = client.pipeline()
    pipe.time()
    pipe.hgetall(keys.owners)
    pipe.zrange(keys.leases, 0, -1, withscores=True)
    (seconds, micros), owners, ends = pipe.execute()
    return leases_of(owners, ends, seconds + micros / 1e6, keys.prefix)


def leases_of(owners: Mapping[str, str], ends: Iterable[tuple[str, float]], now: float, prefix: str) -> list[HeldLease]:
    """Return the leases from `gpuflow.owners` and from the members of `gpuflow.leases` with their ends. Pure.

    An owner is `<worker id>:<token>`, a newline, and the list that the message came from.
    """
    live = {tag for tag, end in ends if end > now - UNSWEPT_SECONDS}
    found = []
    for tag, text in owners.items():
        owner, _, key = text.partition("\n")
        key = key.removeprefix(prefix)
        worker = owner.rpartition(":")[0]
        found.append(
            HeldLease(worker=worker, owner=owner, queue=queue_of(key), priority=priority_of(key), is_live=tag in live)
        )
    return found
