"""Reads the event stream of a task or pipeline: what happened, in order, from any process.

Each entry has an id (`<ms>-<n>`) from which reading can go on after a break, as SSE's Last-Event-ID does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from gpuflow.broker.keys import Keys


@dataclass(frozen=True, kw_only=True)
class LoggedEvent:
    """One event of `source` (a task or pipeline id): its stream id, its name, and all its fields."""

    id: str
    source: str
    name: str
    data: Mapping[str, Any]

    @property
    def at(self) -> float:
        """When it was written, in Unix seconds."""
        return int(self.id.split("-", 1)[0]) / 1000


class EventLog:
    """The event streams of one fleet; `client` must decode responses."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client: Any = client
        self.keys = keys

    def read(self, source: str, after: str = "0", count: int = 1000) -> list[LoggedEvent]:
        """Return up to `count` events after the id `after`, without waiting."""
        entries = self.client.xrange(self.keys.events(source), min=f"({after}", count=count)
        return [self._event(source, entry_id, fields) for entry_id, fields in entries]

    def wait(self, positions: Mapping[str, str], timeout_seconds: float) -> list[LoggedEvent]:
        """Return new events of several sources, waiting up to `timeout_seconds` for the first.

        `positions` maps a source to the id after which to read ('0' for all of it).
        """
        streams = {self.keys.events(source): position for source, position in positions.items()}
        names = {self.keys.events(source): source for source in positions}
        answer = self.client.xread(streams, count=1000, block=max(1, int(timeout_seconds * 1000)))
        pairs: Sequence[Any] = list(answer.items()) if isinstance(answer, dict) else (answer or [])
        found = []
        for key, entries in pairs:
            batch = entries[0] if entries and isinstance(entries[0], list) else entries
            found += [self._event(names[key], entry_id, fields) for entry_id, fields in batch]
        return sorted(found, key=lambda event: tuple(int(part) for part in event.id.split("-")))

    def follow(self, source: str, after: str = "0", timeout_seconds: float | None = None) -> Iterator[LoggedEvent]:
        """Yield events as they come, until the caller stops or `timeout_seconds` pass without one."""
        position, quiet_since = after, time.monotonic()
        while True:
            events = self.wait({source: position}, 1.0)
            for event in events:
                position = event.id
                yield event
            if events:
                quiet_since = time.monotonic()
            elif timeout_seconds is not None and time.monotonic() - quiet_since > timeout_seconds:
                return

    def append(self, source: str, data: Mapping[str, Any], maxlen: int) -> None:
        """Add one event (a mapping with the key `event`)."""
        self.client.xadd(
            self.keys.events(source),
            {"event": json.dumps(data, ensure_ascii=False)},
            maxlen=maxlen,
            approximate=True,
        )

    def _event(self, source: str, entry_id: str, fields: Mapping[str, str]) -> LoggedEvent:
        data = json.loads(fields["event"])
        return LoggedEvent(id=entry_id, source=source, name=str(data.pop("event", "log")), data=data)
