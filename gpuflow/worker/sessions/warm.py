"""One warm session of a worker with all that it holds. Changed by `sessions.pool` alone, under its lock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gpuflow.fleet.gpu_locks import Hold
from gpuflow.protocol import Request
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.sessions.request import SessionRequest
from gpuflow.worker.sessions.session import Session

#: Requests that may wait for a model that is still being loaded.
LOADING_PLACES: Final = 8
#: A session is not ended for a task that waits before it has served for so many times as long as its load took.
PAYS_AFTER_LOADS: Final = 2


@dataclass(kw_only=True, eq=False)
class Warm:
    """A session with what it holds. It is expected, without a process, until the task that it is for begins it."""

    name: str
    opened_for: str
    gpus: tuple[str, ...]
    requirement: Requirement | None
    session: Session | None = None
    hold: Hold | None = None
    variables: str | None = None
    places: set[str] = field(default_factory=set)
    waiting: list[tuple[SessionRequest, Request, str]] = field(default_factory=list)
    pinged_at: float = 0.0
    closed_at: float | None = None

    def has_place(self) -> bool:
        """Whether it takes one more request."""
        if self.session is None or self.session.state == "loading":
            return len(self.places) < LOADING_PLACES
        return self.session.state == "ready" and len(self.places) < self.session.told.max_requests

    def is_idle(self) -> bool:
        """Whether it could be closed at once and nobody would miss an answer."""
        return (
            self.session is not None and self.session.state == "ready" and not self.places and not self.session.running
        )

    def has_served(self, now: float) -> bool:
        """Whether it has been there long enough for its load to pay; `now` is monotonic seconds."""
        session = self.session
        if session is None or session.state != "ready":
            return False
        return now - session.ready_at >= PAYS_AFTER_LOADS * session.told.load_seconds

    @property
    def model(self) -> str:
        """The name of the model, "" as long as it is not loaded."""
        return self.session.told.model if self.session is not None else ""

    @property
    def used_at(self) -> float:
        """When a request of it ended last, in monotonic seconds."""
        return self.session.used_at if self.session is not None else 0.0
