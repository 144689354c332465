"""One consumer's look for something to do: state between its pops. Used by the transport alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kombu.utils.encoding import bytes_to_str

from gpuflow.broker.gate import MessageFilter, SelectedQueue
from gpuflow.broker.lease import Lease
from gpuflow.broker.sweeper import BELL_SECONDS

#: An idle consumer looks again after this many seconds, for messages of producers that ring no doorbell.
RESCAN_SECONDS: Final = 1
#: Names of ready demand queues that come with each pop.
PAGE_NAMES: Final = 100
#: What lies behind them is looked at in pieces of so many names, at most this often (seconds).
FAR_NAMES: Final = 500
FAR_SECONDS: Final = 5.0


@dataclass(kw_only=True)
class Look:
    """One consumer's look for something to do: what it asked for, and what it learnt.

    `plain` and `chosen` are the queues of the last pop (`queues`: both), `page` the names of ready demand queues,
    `woken_for` what the doorbell told, (hops, queue). The next look is at `again_at` (monotonic seconds).
    `is_due` says that it told of a message whose delay ends before the next ordinary sweep.

    `barren` are queues that were chosen and whose messages are all for others, or have to wait. Until `fertile_at` they
    are passed over, so that they do not hide those behind them. One that others have emptied is none: what comes into
    it next is as old as any. `full` are those that were chosen for the warm sessions alone, and gave nothing for them:
    they are passed over for those alone, since a place for other tasks may be free at any moment.

    `done` are messages, with their leases, which the last pop was to end; `has_room` says that one of them has made
    room since that pop was sent.
    """

    queues: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    chosen: list[SelectedQueue] = field(default_factory=list)
    page: list[str] = field(default_factory=list)
    woken_for: tuple[int, str] | None = None
    is_due: bool = False
    known: list[str] = field(default_factory=list)
    barren: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    fertile_at: float = 0.0
    again_at: float = 0.0
    far_at: float = 0.0
    done: dict[str, Lease] = field(default_factory=dict)
    has_room: bool = False

    def names(self) -> list[str]:
        """Return the ready demand queues that are known, best first; what the doorbell told is new, and so last."""
        told = self.woken_for[1] if self.woken_for else ""
        return [*self.page, told] if told and told not in self.page else self.page

    def begin(self, now: float) -> bool:
        """Begin a look, if it is time for one; say whether it is."""
        self.queues, self.chosen = [], []
        if self.has_room:
            self.has_room, self.again_at, self.fertile_at = False, 0.0, now
        if now >= self.fertile_at:
            self._forget()
        return now >= self.again_at

    def names_to_choose(self) -> list[str]:
        """Return the ready demand queues that are known now, and remember that they were asked for."""
        self.known = self.names()
        return self.known

    def refused(self, fitting: Sequence[str]) -> bool:
        """Whether the gate has chosen none of the fitting queues although it was asked for all of them."""
        return not self.chosen and set(fitting) <= set(self.known)

    def in_vain(self, now: float) -> None:
        """Note that no message of the chosen queues was taken: `page` are the queues that have some."""
        self.woken_for = None
        if not self.barren and not self.full:
            self.fertile_at = now + RESCAN_SECONDS
        beyond = len(self.page) == PAGE_NAMES  # what else has some is not known
        for choice in self.chosen:
            if beyond or choice.queue in self.page:
                (self.full if choice.warm_only else self.barren).add(choice.queue)

    def woken(self, reply: Any) -> None:
        """Read the answer of the doorbell: look again, perhaps for a queue that it names."""
        self.again_at, self.is_due = 0.0, False
        if reply:
            hops, _, queue = bytes_to_str(reply[1]).partition(" ")
            self.is_due = hops == "due"
            if queue and hops.isdecimal():
                self.woken_for = int(hops), queue
                self.barren.discard(queue)
                self.full.discard(queue)
            elif not hops:
                self._forget()  # something was given back here: what did not suit may suit now

    def _forget(self) -> None:
        self.barren.clear()
        self.full.clear()

    def found(self, queue: str) -> None:
        """Note that a message of `queue` was taken."""
        self.again_at = 0.0
        if self.woken_for and self.woken_for[1] == queue:
            self.woken_for = None

    def to_json(self, groups: Sequence[str], message_filter: MessageFilter, page: int) -> str:
        """Return how to look, for pop.lua."""
        how: dict[str, Any] = {
            "queues": len(self.queues),
            "page": page,
            "pass_on": f"{self.woken_for[0]} {self.woken_for[1]}" if self.woken_for else "",
            "bell": BELL_SECONDS,
            "groups": groups,
            "limits": [-1] * len(self.plain) + [choice.most_seconds for choice in self.chosen],
            "models": message_filter.models,
            "sessions": message_filter.sessions,
            "full": message_filter.full,
            "user_types": message_filter.user_types,
            "patience": message_filter.patience_seconds,
        }
        if any(choice.warm_only for choice in self.chosen):
            how["warm_only"] = [False] * len(self.plain) + [choice.warm_only for choice in self.chosen]
            how["here"] = message_filter.here
            how["yields"] = [False] * len(self.plain) + [choice.yields for choice in self.chosen]
        if message_filter.kept:
            how["kept"] = message_filter.kept
        if message_filter.secrets is not None:
            how["secrets"] = message_filter.secrets
        if message_filter.types is not None:
            how["types"] = message_filter.types
        if message_filter.gpu_types is not None:
            how["gpu_types"] = message_filter.gpu_types
            how["with_gpus"] = [False] * len(self.plain) + [choice.with_gpus for choice in self.chosen]
        return json.dumps(how)
