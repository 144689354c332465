"""What a page shows, kept once for all browsers that look at it: read when somebody asks, off the event loop.

A page is made of containers (elements with an id), a container of rows: pieces of HTML with a key, in order. A feed
numbers its versions, so that a browser which has version N is sent only the rows that have changed since.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

#: Rows of each container: key and HTML.
Rows = Mapping[str, Sequence[tuple[str, str]]]

#: A feed is read again after so many seconds,
FRESH_SECONDS: Final = 1.9
#: and after so many times what reading it took: of a large fleet, at most a tenth of the process's time goes there.
READ_SHARE: Final = 10.0
#: So many feeds are read at the same time; the others wait.
THREADS: Final = 4
#: So many feeds are kept; those that were asked for last.
MOST_FEEDS: Final = 64
#: A browser whose version is older than by so many is sent everything.
MOST_VERSIONS: Final = 30
#: Shorter answers are not compressed, in bytes.
_LEAST_COMPRESSED: Final = 1024
_COMPRESSION: Final = 5


@dataclass
class _Row:
    html: str
    changed: int


@dataclass
class _Container:
    order: list[str] = field(default_factory=list)
    order_changed: int = 0
    rows: dict[str, _Row] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Body:
    """An answer: its bytes, and the same compressed (None: it is too short for that)."""

    plain: bytes
    compressed: bytes | None

    @classmethod
    def of(cls, text: str) -> Body:
        """Return the body of a text."""
        plain = text.encode("utf-8", "replace")
        small = len(plain) < _LEAST_COMPRESSED
        return cls(plain=plain, compressed=None if small else gzip.compress(plain, _COMPRESSION, mtime=0))


class Feed:
    """One page's rows, and which version changed each. `update` by one thread at once, the rest by any."""

    def __init__(self, read: Callable[[], Rows]) -> None:
        self._read = read
        # Another process, or a feed that was forgotten, counts anew: its versions are told apart by this.
        self._epoch = secrets.token_hex(4)
        self._containers: dict[str, _Container] = {}
        self._bodies: dict[int, Body] = {}
        self._lock = threading.Lock()  # of what stands above, never held for long: the event loop takes it too
        self._encoding = threading.Lock()  # each body is made once
        self.version = 0
        self.read_seconds = 0.0

    def update(self) -> None:
        """Read the rows again and note what has changed. Raises what reading raises; the feed stays as it was then."""
        began = time.perf_counter()
        found = self._read()
        with self._lock:
            self._note_changes(found)
        self.read_seconds = time.perf_counter() - began

    def _note_changes(self, found: Rows) -> None:
        self.version += 1
        self._bodies.clear()
        for name, rows in found.items():
            container = self._containers.setdefault(name, _Container())
            order = [key for key, _ in rows]
            if order != container.order:
                container.order, container.order_changed = order, self.version
            before = container.rows
            container.rows = {}
            for key, html in rows:
                old = before.get(key)
                container.rows[key] = old if old is not None and old.html == html else _Row(html, self.version)

    def html(self, container: str) -> str:
        """Return all rows of a container."""
        with self._lock:
            found = self._containers.get(container, _Container())
            return "\n".join(found.rows[key].html for key in found.order)

    @property
    def label(self) -> str:
        """The version as browsers know it."""
        return f"{self._epoch}.{self.version}"

    def changes(self, since: str) -> Body:
        """Return what has changed since a version, as JSON; everything, where it is none of this feed, or an old one.

        It encodes and compresses: for a thread, not for the event loop.
        """
        epoch, _, number = since.partition(".")
        known = epoch == self._epoch and number.isascii() and number.isdigit() and len(number) < 10
        base = int(number) if known else 0
        with self._encoding:
            with self._lock:
                version = self.version
                if not version - MOST_VERSIONS <= base <= version:
                    base = 0
                body = self._bodies.get(base)
                changed = self._changes(base) if body is None else {}
            if body is None:
                body = Body.of(json.dumps(changed, ensure_ascii=False))
                with self._lock:
                    if version == self.version:
                        self._bodies[base] = body
            return body

    def _changes(self, base: int) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name, container in self._containers.items():
            part: dict[str, Any] = {
                "rows": {key: row.html for key, row in container.rows.items() if row.changed > base},
            }
            if container.order_changed > base:
                part["order"] = container.order
            if part["rows"] or "order" in part:
                changed[name] = part
        return {"version": self.label, "containers": changed}


@dataclass
class _Kept:
    feed: Feed
    good_until: float = float("-inf")
    error: Exception | None = None
    pending: asyncio.Future[None] | None = None
    #: What `pending` reads may be older than an action.
    stale: bool = False


class Feeds:
    """The feeds of one Flower: each is read by one thread, at most once in its time, however many browsers ask."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="monitor")

    async def fresh(self, key: str, read: Callable[[], Rows]) -> Feed:
        """Return a feed as it was a moment ago. Raises what reading it has raised a moment ago."""
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(Feed(read))
        self._kept.move_to_end(key)
        if kept.pending is not None and kept.stale:
            await asyncio.shield(kept.pending)
        if self._clock() >= kept.good_until:
            if kept.pending is None:
                kept.pending = asyncio.ensure_future(self._update(key, kept))
            await asyncio.shield(kept.pending)
        if kept.error is not None:
            raise kept.error
        while len(self._kept) > MOST_FEEDS:
            self._kept.popitem(last=False)
        return kept.feed

    async def _update(self, key: str, kept: _Kept) -> None:
        kept.stale = False
        try:
            await asyncio.get_running_loop().run_in_executor(self.threads, kept.feed.update)
            kept.error = None
        except Exception as error:  # noqa: BLE001  (told to everybody who asks within the feed's time)
            kept.error = error
            if not kept.feed.version and self._kept.get(key) is kept:
                del self._kept[key]
        finally:
            if not kept.stale:
                kept.good_until = self._clock() + max(FRESH_SECONDS, READ_SHARE * kept.feed.read_seconds)
            kept.pending = None

    def expire(self) -> None:
        """Let every feed be read again at its next request: an action has just changed the fleet."""
        for kept in self._kept.values():
            kept.good_until = float("-inf")
            kept.stale = True


__all__ = ["Body", "Feed", "Feeds", "Rows"]
