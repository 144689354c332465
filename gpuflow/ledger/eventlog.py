"""Reads the event stream of a task or pipeline: what happened, in order, from any process.

Each entry has an id (`<ms>-<n>`) from which reading can go on after a break, as SSE's Last-Event-ID does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis

from gpuflow.broker.keys import Keys
from gpuflow.ledger.states import FINAL, TaskState


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


class EventCursor:
    """Reads on in the streams of several tasks and pipelines. What the run of a merged call tells is told by its
    caller.

    A run's final state is left out: its caller has one of its own.
    """

    def __init__(self, log: EventLog, sources: Iterable[str]) -> None:
        self._log = log
        self._sources = set(sources)
        self._positions = dict.fromkeys(self._sources, "0")
        #: Run -> its callers among the sources, each with the key of its call.
        self._callers: dict[str, dict[str, str]] = {}

    def add(self, source: str) -> None:
        """Read another stream, too."""
        if source not in self._sources:
            self._sources.add(source)
            self._positions.setdefault(source, "0")

    def wait(self, timeout_seconds: float) -> list[LoggedEvent]:
        """Return new events, waiting up to `timeout_seconds` for the first."""
        found: list[LoggedEvent] = []
        for event in self._log.wait(self._positions, timeout_seconds):
            self._positions[event.source] = event.id
            if event.source in self._sources:
                self._note_run(event)
                found.append(event)
            found += self._as_callers(event)
        return found

    def _note_run(self, event: LoggedEvent) -> None:
        if event.name != "state":
            return
        for run, callers in list(self._callers.items()):
            callers.pop(event.source, None)
            if not callers:
                del self._callers[run]
                if run not in self._sources:
                    self._positions.pop(run, None)
        run_id = event.data.get("run")
        if event.data.get("state") == TaskState.MERGED and run_id:
            self._callers.setdefault(str(run_id), {})[event.source] = str(event.data.get("call", ""))
            self._positions.setdefault(str(run_id), "0")

    def _as_callers(self, event: LoggedEvent) -> list[LoggedEvent]:
        if event.name == "state" and event.data.get("state") in FINAL:
            return []
        child = event.data.get("child")
        data = {name: value for name, value in event.data.items() if name != "child"}
        return [
            replace(event, source=caller, data=data)
            for caller, call in self._callers.get(event.source, {}).items()
            if child in (None, call)
        ]
