"""Reads the event stream of a task or pipeline: what happened, in order, from any process.

Each entry has an id (`<ms>-<n>`) from which reading can go on after a break, as SSE's Last-Event-ID does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import redis

from gpuflow.broker.keys import Keys
from gpuflow.ledger.states import FINAL, TaskState

#: How long to wait for events that are there already, in seconds.
_AT_ONCE_SECONDS: Final = 0.001


@dataclass(frozen=True, kw_only=True)
class LoggedEvent:
    """One event of `source` (a task or pipeline id): its stream id, its name, and all its fields.

    `stream` is whose stream it comes from, where that is another one: the run of a merged call.
    """

    id: str
    source: str
    name: str
    data: Mapping[str, Any]
    stream: str = ""

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
        return [as_event(source, entry_id, fields) for entry_id, fields in entries]

    def newest(self, sources: Sequence[str], count: int) -> list[LoggedEvent]:
        """Return the newest `count` events of each source, in order of time, in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        for source in sources:
            pipe.xrevrange(self.keys.events(source), count=count)
        found = [
            as_event(source, entry_id, fields)
            for source, entries in zip(sources, pipe.execute(), strict=True)
            for entry_id, fields in entries
        ]
        return sorted(found, key=lambda event: order_of(event.id))

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
            found += [as_event(names[key], entry_id, fields) for entry_id, fields in batch]
        return sorted(found, key=lambda event: order_of(event.id))

    def append(self, source: str, data: Mapping[str, Any], maxlen: int) -> None:
        """Add one event (a mapping with the key `event`)."""
        self.client.xadd(
            self.keys.events(source),
            {"event": json.dumps(data, ensure_ascii=False)},
            maxlen=maxlen,
            approximate=True,
        )


class EventReader(Protocol):
    """Where a cursor gets its events from: the event log, or what somebody has read of it already."""

    def wait(self, positions: Mapping[str, str], timeout_seconds: float) -> list[LoggedEvent]:
        """Return events of the sources after their positions."""
        ...


class EventCursor:
    """Reads on in the streams of several tasks and pipelines. What the run of a merged call tells is told by its
    caller.

    A run's final state is left out: its caller has one of its own.
    """

    def __init__(self, log: EventReader, sources: Iterable[str]) -> None:
        self._log = log
        self._sources = set(sources)
        self._positions = dict.fromkeys(self._sources, "0")
        #: Run -> its callers among the sources: the key of the call, and the event with which it waited no more, or "".
        self._callers: dict[str, dict[str, tuple[str, str]]] = {}

    @property
    def positions(self) -> Mapping[str, str]:
        """Each stream that is read, and the id after which it is read on."""
        return self._positions

    def add(self, source: str) -> None:
        """Read another stream, too."""
        if source not in self._sources:
            self._sources.add(source)
            self._positions.setdefault(source, "0")

    def wait(self, timeout_seconds: float) -> list[LoggedEvent]:
        """Return new events in order, waiting up to `timeout_seconds` for the first."""
        known = set(self._callers)
        found = self._read(self._positions, timeout_seconds)
        if new := {run: self._positions[run] for run in self._callers if run not in known}:
            found += self._read(new, _AT_ONCE_SECONDS)
        return sorted(found, key=lambda event: order_of(event.id))

    def _read(self, positions: Mapping[str, str], timeout_seconds: float) -> list[LoggedEvent]:
        found: list[LoggedEvent] = []
        for event in self._log.wait(positions, timeout_seconds):
            self._positions[event.source] = event.id
            if event.source in self._sources:
                self._note_run(event)
                found.append(event)
            found += self._as_callers(event)
        return found

    def _note_run(self, event: LoggedEvent) -> None:
        """Learn from a state of a source whether it waits for a run, from now on or no more."""
        if event.name != "state" or event.data.get("state") in (TaskState.STARTING, TaskState.RUNNING):
            return
        for callers in self._callers.values():
            if event.source in callers:
                call, until = callers[event.source]
                callers[event.source] = (call, until or event.id)
        run_id = event.data.get("run")
        if event.data.get("state") == TaskState.MERGED and run_id:
            self._callers.setdefault(str(run_id), {})[event.source] = (str(event.data.get("call", "")), "")
            self._positions.setdefault(str(run_id), "0")

    def _as_callers(self, event: LoggedEvent) -> list[LoggedEvent]:
        if event.name == "state" and event.data.get("state") in FINAL:
            return []
        child = event.data.get("child")
        data = {name: value for name, value in event.data.items() if name != "child"}
        return [
            replace(event, source=caller, data=data, stream=event.source)
            for caller, (call, until) in self._callers.get(event.source, {}).items()
            if child in (None, call) and not (until and order_of(event.id) > order_of(until))
        ]


def as_event(source: str, entry_id: str, fields: Mapping[str, str]) -> LoggedEvent:
    """Return an entry of the stream of `source` as an event."""
    data = json.loads(fields["event"])
    return LoggedEvent(id=entry_id, source=source, name=str(data.pop("event", "log")), data=data)


def order_of(event_id: str) -> tuple[int, ...]:
    """Return what sorts stream ids by time."""
    return tuple(int(part) for part in event_id.split("-"))
