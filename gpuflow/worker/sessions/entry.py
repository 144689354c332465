"""One warm session of a worker with all that it holds. Changed by `sessions.table` alone, under its lock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

from gpuflow.fleet.gpu_locks import Hold
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.sessions.process import SessionProcess
from gpuflow.worker.sessions.view import View

#: Requests that may wait for a model that is still being loaded.
LOADING_PLACES: Final = 8
#: A session is not ended for a task that waits before it has served for so many times as long as its load took.
PAYS_AFTER_LOADS: Final = 2


@dataclass(kw_only=True, eq=False)
class SessionEntry:
    """A session with its GPUs, and the messages that have a place in it.

    It is expected, without a process, until the first of these messages begins it. One that is `leaving` gives no
    place away and is closed with the last request; `closed_at` is when that was (monotonic seconds). One that answers
    `in_turn` has a single place, also while it loads: what comes later waits in its queue, where order holds.
    `loading_places` is how many requests may wait while it loads.
    `replica` is the message of a replica of a served model: its place takes none of the engine's, and as long as it
    lasts the session is not ended for others.
    """

    name: str
    hold: Hold | None
    requirement: Requirement | None
    session: SessionProcess | None = None
    variables: str = ""
    view: View | None = None
    in_turn: bool = False
    loading_places: int = LOADING_PLACES
    places: set[str] = field(default_factory=set)
    replica: str | None = None
    leaving: bool = False
    pinged_at: float = 0.0
    closed_at: float | None = None
    #: Held by the one attempt that begins the process; others with a place wait for it.
    opening: threading.Lock = field(default_factory=threading.Lock)

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of its GPUs."""
        return self.hold.uuids if self.hold is not None else ()

    @property
    def memory_mib(self) -> int:
        """The memory of the machine that it keeps."""
        return (self.requirement.memory_mib or 0) if self.requirement is not None else 0

    @property
    def model(self) -> str:
        """The name of the model, "" as long as it is not loaded."""
        return self.session.told.model if self.session is not None else ""

    @property
    def used_at(self) -> float:
        """When a request of it ended last, in monotonic seconds."""
        return self.session.used_at if self.session is not None else 0.0

    @property
    def requests(self) -> int:
        """How many messages have a place to be answered."""
        return len(self.places) - (self.replica in self.places)

    def has_place(self, now: float) -> bool:
        """Whether it takes one more request."""
        if self.leaving or (self.in_turn and self.places):
            return False
        if self.session is None or self.session.state == "loading":
            return self.requests < self.loading_places
        return (
            self.session.state == "ready"
            and self.requests < self.session.told.max_requests
            and not self.session.is_suspect(now)
        )

    def answers_soon(self, now: float) -> bool:
        """Whether what has no place in it now will have one soon: not where it works on a call that may take hours."""
        session = self.session
        if session is None or not session.of_function or not session.ready_at:
            return True
        return session.told.max_requests > 1 or self.has_place(now)

    def may_keep(self, now: float) -> bool:
        """Whether a replica could begin to keep it loaded."""
        if self.leaving or self.in_turn or self.replica is not None:
            return False
        return self.session is None or (self.session.state in ("loading", "ready") and not self.session.is_suspect(now))

    def is_too_old(self, now: float) -> bool:
        """Whether it has lived for as long as it may, by a limit of its own."""
        session = self.session
        limit = session.told.lifetime_seconds if session is not None else None
        return session is not None and limit is not None and session.ready_at > 0 and now - session.ready_at > limit

    def is_idle(self) -> bool:
        """Whether it could be closed at once and nobody would miss an answer; a load that nobody waits for, too."""
        return (
            self.session is not None
            and self.session.state in ("loading", "ready")
            and not self.places
            and not self.session.running
        )

    def has_served(self, now: float) -> bool:
        """Whether it has been there long enough for its load to pay."""
        session = self.session
        if session is None or session.state != "ready" or self.replica is not None:
            return False
        return now - session.ready_at >= PAYS_AFTER_LOADS * session.told.load_seconds
