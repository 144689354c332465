"""Where a reader of several event streams is: what the id of an event says, and a Last-Event-ID is read as.

The streams of a pipeline's tasks, and of the run of a merged call, do not come in one order: an event may be told after
a later one of another stream. So an id holds how far each stream was told. `MS-N` is the place in the own stream of the
task or pipeline alone; `MS-N.REST` holds a place for each stream, 15 bytes in base64url; `MS-N.*` is a place in all.
Where there are more than MOST streams, those that were told longest ago are left out, and are told again.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final

from gpuflow.ledger.eventlog import LoggedEvent, order_of

#: Streams whose places an id holds: 20 characters each, within the 8 KiB that proxies pass on as a header.
MOST: Final = 256
#: Streams up to which every event has an id; with more, the last one of each write alone has.
EACH: Final = 16
_NAME_BYTES: Final = 6
_MS_BYTES: Final = 6
_PART_BYTES: Final = 3
_ENTRY: Final = _NAME_BYTES + _MS_BYTES + _PART_BYTES
_ID: Final = re.compile(rf"(\d{{1,20}}(?:-\d{{1,20}})?)(?:\.(\*|(?:[A-Za-z0-9_-]{{20}}){{1,{MOST + 1}}}))?")
#: The name of an entry that is a place in all streams.
_ALL: Final = bytes(_NAME_BYTES)
_Order = tuple[int, ...]


class Positions:
    """How far each stream of a record was told. `last_id` is a Last-Event-ID; ValueError for what is none."""

    def __init__(self, record_id: str, last_id: str | None = None) -> None:
        self._names: dict[tuple[str, str], bytes] = {}
        self._told: dict[bytes, _Order] = {}
        self._all: _Order = ()
        self._newest = "0-0"
        if last_id is None:
            return
        read = _ID.fullmatch(last_id)
        if read is None:
            raise ValueError("no id of an event")
        at, rest = read.groups()
        self._newest = at
        if rest == "*":
            self._all = order_of(at)
        elif rest is None:
            self._told[self._name(record_id, record_id)] = order_of(at)
        else:
            self._told.update(_decoded(rest))
            self._all = self._told.pop(_ALL, ())

    def __len__(self) -> int:
        return len(self._told)

    def was_told(self, event: LoggedEvent) -> bool:
        """Whether an event is not after the place of its stream."""
        return order_of(event.id) <= max(self._all, self._told.get(self._name_of(event), ()))

    def tell(self, event: LoggedEvent) -> None:
        """Note that an event is told now."""
        name = self._name_of(event)
        self._told.pop(name, None)  # so that those told last are last
        self._told[name] = order_of(event.id)
        self._newest = event.id

    def id_of(self, record_id: str) -> str:
        """Return the id of the event that was told last."""
        if set(self._told) == {self._name(record_id, record_id)} and not self._all:
            return self._newest
        entries = list(self._told.items())[-MOST:]
        if self._all:
            entries.insert(0, (_ALL, self._all))
        packed = b"".join(name + _packed(order) for name, order in entries)
        return f"{self._newest}.{base64.urlsafe_b64encode(packed).decode('ascii')}"

    def id_of_end(self) -> str:
        """Return an id after which nothing of what has ended is told again."""
        newest = max([self._all, *self._told.values()], default=())
        return "-".join(map(str, newest or (0, 0))) + ".*"

    def _name_of(self, event: LoggedEvent) -> bytes:
        return self._name(event.stream or event.source, event.source)

    def _name(self, stream: str, source: str) -> bytes:
        """Return what names a stream, as it is told of one source: a run is told of each of its callers."""
        name = self._names.get((stream, source))
        if name is None:
            text = f"{stream}\0{source}".encode(errors="replace")
            name = self._names[stream, source] = hashlib.blake2b(text, digest_size=_NAME_BYTES).digest()
        return name


def _packed(order: _Order) -> bytes:
    """Return a place in bytes; one that does not fit becomes an earlier one, so that nothing is lost."""
    ms, part = (*order, 0)[:2]
    if ms >= 1 << 8 * _MS_BYTES:
        ms, part = (1 << 8 * _MS_BYTES) - 1, 0
    part = min(part, (1 << 8 * _PART_BYTES) - 1)
    return ms.to_bytes(_MS_BYTES, "big") + part.to_bytes(_PART_BYTES, "big")


def _decoded(text: str) -> dict[bytes, _Order]:
    raw = base64.urlsafe_b64decode(text)
    found: dict[bytes, _Order] = {}
    for start in range(0, len(raw), _ENTRY):
        name, place = raw[start : start + _NAME_BYTES], raw[start + _NAME_BYTES : start + _ENTRY]
        found[name] = (int.from_bytes(place[:_MS_BYTES], "big"), int.from_bytes(place[_MS_BYTES:], "big"))
    return found
