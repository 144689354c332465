"""What the broker did, in its own order: its MONITOR stream, read for looks, takes and ends of messages.

One server runs one command after another, so the order of what is read here is what happened, however slow the machine
is and however late anybody was told.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self

from redis.exceptions import RedisError

from tests.support.waiting import eventually, patient

_BELL: Final = re.compile(r"gpuflow\.bell:([^ ]+):[0-9a-f]{32}\b")
_TASK_ID: Final = re.compile(r'"id": "([0-9a-f-]{36})"')


@dataclass(frozen=True, kw_only=True)
class Event:
    """One step of the broker.

    `look`: a worker looked for a message because its second was over, and nobody had woken it. `take`: a worker got a
    message. `end`: a message was acknowledged.
    """

    kind: Literal["look", "take", "end"]
    worker: str = ""
    task: str = ""


@dataclass(kw_only=True)
class BrokerLog:
    """Reads what a broker does from the moment of its entry on. The reader ends with the block, however that ends."""

    client: Any
    _read: list[Event] = field(default_factory=list)
    _task_of: dict[str, str] = field(default_factory=dict)
    _asleep: set[str] = field(default_factory=set)
    _rung: Counter[str] = field(default_factory=Counter)
    _reads: threading.Event = field(default_factory=threading.Event)
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        eventually(self._reads.is_set, what="the broker's log")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.events()

    def events(self) -> list[Event]:
        """Return all that has happened until now, in order; reading ends."""
        if self._thread.is_alive():
            self.client.echo(self._mark)
            self._thread.join(timeout=patient(60))
        assert not self._thread.is_alive(), "the log of the broker has no end"
        return self._read

    def _listen(self) -> None:
        try:
            with self.client.monitor() as monitor:
                self._reads.set()
                for told in monitor.listen():
                    if told["command"] == f"ECHO {self._mark}":
                        return
                    self._read.extend(self._events_of(told["command"]))
        except (RedisError, OSError):
            return  # the broker has ended

    def _events_of(self, command: str) -> Iterator[Event]:
        name, _, rest = command.partition(" ")
        bell = _BELL.search(rest)
        worker = bell[1] if bell else ""
        if name == "BLPOP" and bell:
            if self._rung[worker]:
                self._rung[worker] -= 1
            else:
                self._asleep.add(worker)
        elif name == "LPUSH" and bell:
            if worker in self._asleep:
                self._asleep.discard(worker)
            else:
                self._rung[worker] += 1
        elif name == "EVALSHA" and '"pass_on"' in rest and worker in self._asleep:
            self._asleep.discard(worker)
            yield Event(kind="look", worker=worker)
        elif name == "HSET" and rest.startswith("gpuflow.unacked "):
            _, tag, raw = rest.split(" ", 2)
            found = _TASK_ID.search(raw)
            self._task_of[tag] = found[1] if found else ""
        elif name == "HSET" and rest.startswith("gpuflow.owners "):
            _, tag, owner_and_list = rest.split(" ", 2)
            yield Event(kind="take", worker=owner_and_list.partition(":")[0], task=self._task_of.get(tag, ""))
        elif name == "HDEL" and rest.startswith("gpuflow.unacked "):
            tag = rest.split(" ")[1]
            yield Event(kind="end", task=self._task_of.get(tag, ""))
