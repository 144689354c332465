"""Event streams for many readers: one poller and a few connections for all of them.

`Hub` follows each stream that somebody reads, once, and keeps its newest entries. A reader takes from those; what is
older it reads from the broker. So a slow reader holds nothing, and hundreds of readers cost no thread and no connection
each. Used by `event_routes` alone; everything here runs in the loop of the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import redis.asyncio
from redis.exceptions import RedisError

from gpuflow.broker.keys import Keys
from gpuflow.ledger.eventlog import EventCursor, LoggedEvent, as_event, order_of
from gpuflow.logs import get_logger

#: Entries of a stream that are kept for its readers.
KEPT: Final = 512
#: Connections to the broker, one of them the poller's.
CONNECTIONS: Final = 8
#: How long one poll waits, in milliseconds, unless a new stream is to be followed.
_POLL_MS: Final = 200
#: A poll is given so long, in seconds, before one with the new streams takes its place: what is there already comes.
_LEAST_POLL_SECONDS: Final = 0.01
_PAGE: Final = 500
_PAUSE_SECONDS: Final = 0.5

log = get_logger("gpuflow.gateway")


class UnreadableStream(Exception):
    """What a stream holds is nothing that gpuflow has written."""


@dataclass(kw_only=True, eq=False)
class Feed:
    """The newest entries of one stream: all of those after `start`. `last` is the id after which it is read on."""

    source: str
    start: str
    last: str
    kept: deque[LoggedEvent] = field(default_factory=deque)
    readers: set[asyncio.Event] = field(default_factory=set)
    #: Why it cannot be read on; its readers end with that.
    broken: str = ""

    def end(self, why: str) -> None:
        """Read it no more, and wake the readers."""
        self.broken = why
        for reader in self.readers:
            reader.set()

    def append(self, events: list[LoggedEvent]) -> None:
        """Keep new entries, and wake the readers."""
        for event in events:
            self.kept.append(event)
            self.last = event.id
            if len(self.kept) > KEPT:
                self.start = self.kept.popleft().id
        for reader in self.readers:
            reader.set()

    def after(self, position: str) -> list[LoggedEvent] | None:
        """Return what came after a position; None where that is not kept any more."""
        if order_of(position) < order_of(self.start):
            return None
        found: list[LoggedEvent] = []
        for event in reversed(self.kept):
            if order_of(event.id) <= order_of(position):
                break
            found.append(event)
        return found[::-1]


class Hub:
    """The streams that are read. `address` gives that of the broker, when it is first needed."""

    def __init__(self, address: Callable[[], str], keys: Keys, *, most_readers: int) -> None:
        self._address, self._keys = address, keys
        self._feeds: dict[str, Feed] = {}
        self._client: Any = None
        self._poller: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self.most_readers = most_readers
        self.readers = 0
        self.stopping = asyncio.Event()

    @property
    def streams(self) -> int:
        """How many streams are followed now."""
        return len(self._feeds)

    async def open(self, source: str, reader: asyncio.Event) -> Feed:
        """Follow a stream for a reader, whose event is set when there is more. Raises redis errors, BrokerUnavailable.

        Once a reader has it open, `close` is owed.
        """
        feed = self._feeds.get(source)
        if feed is None or feed.broken:
            newest = await self.client.xrevrange(self._keys.events(source), count=1)
            at = newest[0][0] if newest else "0-0"
            feed = self._feeds.get(source)  # another reader may have opened it meanwhile
            if feed is None or feed.broken:
                feed = self._feeds[source] = Feed(source=source, start=at, last=at)
                self._opened.set()
        feed.readers.add(reader)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        return feed

    def close(self, feed: Feed, reader: asyncio.Event) -> None:
        """Let go of a stream; the last reader of one ends its following."""
        feed.readers.discard(reader)
        if not feed.readers and self._feeds.get(feed.source) is feed:
            del self._feeds[feed.source]

    async def read(self, source: str, after: str) -> list[LoggedEvent]:
        """Return up to a page of older entries, from the broker. Raises redis errors."""
        entries = await self.client.xrange(self._keys.events(source), min=f"({after}", count=_PAGE)
        return _events(source, entries)

    @property
    def client(self) -> Any:
        """The connections of the hub."""
        if self._client is None:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                self._address(),
                decode_responses=True,
                max_connections=CONNECTIONS,
                timeout=10,
                socket_connect_timeout=5,
                socket_timeout=10,
            )
            self._client = redis.asyncio.Redis(connection_pool=pool)
        return self._client

    def stop(self) -> None:
        """Wake every reader, so that its stream ends with a hint when to come again."""
        self.stopping.set()
        for feed in self._feeds.values():
            for reader in feed.readers:
                reader.set()

    async def aclose(self) -> None:
        """Let go of everything."""
        self.stop()
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
        if self._client is not None:
            await self._client.aclose()
            await self._client.connection_pool.disconnect()

    async def _poll(self) -> None:
        while True:
            if not self._feeds:
                self._poller = None  # the next reader starts another
                return
            self._opened.clear()
            followed = {source: feed for source, feed in self._feeds.items() if not feed.broken}
            try:
                if followed:
                    await self._poll_once(followed)
                else:
                    await asyncio.sleep(_POLL_MS / 1000)
            except (RedisError, OSError) as error:
                log.warning("broker_away", cause=f"events cannot be read: {error}")
                await asyncio.sleep(_PAUSE_SECONDS)
            except Exception:  # one stream must not end the others, whatever is in it
                log.exception("gateway.events_unread")
                await self._leave_out_broken(followed)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _leave_out_broken(self, followed: Mapping[str, Feed]) -> None:
        """Read streams one by one, and end those that cannot be read."""
        for source, feed in followed.items():
            try:
                await self.read(source, feed.last)
            except (RedisError, OSError):
                return
            except Exception as error:
                log.exception("gateway.stream_unreadable", source=source)
                feed.end(f"{type(error).__name__}: {error}")

    async def _poll_once(self, followed: Mapping[str, Feed]) -> None:
        names = {self._keys.events(source): feed for source, feed in followed.items()}
        positions = {key: feed.last for key, feed in names.items()}
        reading = asyncio.ensure_future(self.client.xread(positions, count=_PAGE, block=_POLL_MS))
        opened = asyncio.create_task(self._opened.wait())
        try:
            await asyncio.wait({reading, opened}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading}, timeout=_LEAST_POLL_SECONDS)
            if not reading.done():
                return  # the next poll reads from the same positions, and the new streams too
            answer = reading.result()
        finally:
            for task in (reading, opened):
                task.cancel()
            await asyncio.gather(reading, opened, return_exceptions=True)
        pairs = list(answer.items()) if isinstance(answer, dict) else (answer or [])
        for key, entries in pairs:
            batch = entries[0] if entries and isinstance(entries[0], list) else entries
            names[key].append(_events(names[key].source, batch))


def _events(source: str, entries: Sequence[tuple[str, Mapping[str, str]]]) -> list[LoggedEvent]:
    """Return entries as events. One that cannot be read must not hold up those after it, nor other streams."""
    found = []
    for id, fields in entries:
        try:
            found.append(as_event(source, id, fields))
        except (ValueError, KeyError, TypeError, AttributeError):
            found.append(LoggedEvent(id=id, source=source, name="unreadable", data={}))
    return found


class Reader:
    """Reads the events of a task, or of a pipeline and its tasks, in order; `async with`.

    What the run of a merged call tells comes with it, as `EventCursor` has it.
    """

    def __init__(self, hub: Hub, source: str) -> None:
        self._hub = hub
        self.cursor = EventCursor(self, [source])
        self._more = asyncio.Event()
        self._feeds: dict[str, Feed] = {}
        self._read: dict[str, list[LoggedEvent]] = {}

    async def __aenter__(self) -> Reader:
        self._hub.readers += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hub.readers -= 1
        for feed in self._feeds.values():
            self._hub.close(feed, self._more)

    async def rest(self) -> list[LoggedEvent]:
        """Return new events of what has ended, as the broker has them: the poller may not have read the last ones yet.

        Raises redis errors, BrokerUnavailable.
        """
        return self.cursor.wait(0) if await self._gather(at_broker=True) else []

    async def next(self, timeout_seconds: float) -> list[LoggedEvent]:
        """Return new events, waiting up to `timeout_seconds`; an empty list also when the gateway stops.

        Raises redis errors, BrokerUnavailable.
        """
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while True:
            self._more.clear()
            known = len(self.cursor.positions)
            if await self._gather():
                return self.cursor.wait(0)
            if len(self.cursor.positions) > known:
                continue
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or self._hub.stopping.is_set():
                return []
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), left)

    def wait(self, positions: Mapping[str, str], timeout_seconds: float) -> list[LoggedEvent]:
        """Return what was gathered of these streams: the cursor reads by this."""
        found = [event for source in positions for event in self._read.pop(source, [])]
        return sorted(found, key=lambda event: order_of(event.id))

    async def _gather(self, *, at_broker: bool = False) -> bool:
        for source, position in list(self.cursor.positions.items()):
            feed = self._feeds.get(source)
            if feed is None:
                feed = self._feeds[source] = await self._hub.open(source, self._more)
            if feed.broken:
                raise UnreadableStream(f"the events of {source} cannot be read: {feed.broken}")
            found = None if at_broker else feed.after(position if "-" in position else f"{position}-0")
            if found is None:
                found = await self._hub.read(source, position)
            if found:
                self._read[source] = found
        return bool(self._read)
