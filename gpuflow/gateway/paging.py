"""Pages of tasks and pipelines, the newest first, with an opaque cursor.

A cursor is where the last page ended: when its last record was submitted, and its id. What is submitted meanwhile moves
nothing. Called by the routes, in threads.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import redis

from gpuflow.gateway.problems import Problem

R = TypeVar("R")

#: Most records that one page looks at: one with a filter may hold fewer than its limit, and has a `next` then.
_LOOKED_AT: Final = 5000
_CHUNK: Final = 200
#: Comes after every id: a page that begins there looks at all records of that time again.
_LAST_ID: Final = "\x7f"


def page(
    client: redis.Redis,
    index: str,
    cursor: str | None,
    limit: int,
    read: Callable[[Sequence[str]], Sequence[R | None]],
    wanted: Callable[[R], bool],
    *,
    scoped: bool = False,
) -> tuple[list[R], str | None]:
    """Return up to `limit` records that are `wanted`, and the cursor of the next page (None: there is none).

    `scoped`: the cursor names no record that is not `wanted`, since its holder may not know of it.
    `index` is the sorted set of ids by time; `read` gives the records of ids in order. Raises Problem 400, and
    redis errors.
    """
    found: list[R] = []
    after = _decoded(cursor) if cursor else None
    looked_at = 0
    for entries in _chunks(client, index, after):
        for (id, score), record in zip(entries, read([id for id, _ in entries]), strict=True):
            if len(found) == limit:
                return found, _encoded(*after) if after else None
            if looked_at == _LOOKED_AT:
                return found, _encoded(after[0], _LAST_ID if scoped else after[1]) if after else None
            after, looked_at = (score, id), looked_at + 1
            if record is not None and wanted(record):
                found.append(record)
    return found, None


def _chunks(client: Any, index: str, after: tuple[float, str] | None) -> Iterator[list[tuple[str, float]]]:
    """Yield ids with their times after a place, the newest first; of equal times the last id first, as Redis does."""
    offset = 0  # among those of the time that the place has; what is submitted meanwhile has a later one
    while True:
        highest = "+inf" if after is None else repr(after[0])
        raw = client.zrevrangebyscore(index, highest, "-inf", start=offset, num=_CHUNK, withscores=True)
        if not raw:
            return
        found = [(str(id), float(score)) for id, score in raw]
        entries = found
        if after is not None:
            entries = [one for one in found if (one[1], one[0].encode()) < (after[0], after[1].encode())]
        last = (found[-1][1], found[-1][0])
        offset = offset + len(found) if after is not None and last[0] == after[0] else 0
        if after is None or (last[0], last[1].encode()) < (after[0], after[1].encode()):
            after = last
        if entries:
            yield entries


def _encoded(score: float, id: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([score, id]).encode()).decode().rstrip("=")


def _decoded(cursor: str) -> tuple[float, str]:
    try:
        raw = base64.b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        score, id = json.loads(raw)
        if isinstance(id, str) and isinstance(score, float | int) and math.isfinite(score):
            id.encode()
            return float(score), id
    except (ValueError, binascii.Error, TypeError, RecursionError, OverflowError):
        pass
    raise Problem(400, "bad-cursor", "the cursor is none of this list; take it from `next` of an answer")
