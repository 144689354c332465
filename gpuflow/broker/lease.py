"""One lease of this process. Plain data, kept by the lease table."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: As the time of the last return of a message that never went back.
NEVER: Final = "0"


class Used(NamedTuple):
    """A signature that has been used when its message is acknowledged: its id, and for how long it is valid yet."""

    id: str
    seconds: int


@dataclass(kw_only=True)
class Lease:
    """One leased message: where it came from, its text, and what works on it.

    `task` and `attempt` name the attempt that a supervisor has begun; `beat_at` is when that supervisor was last
    alive (monotonic seconds), None while nobody has to be. `delivery` tells the times apart that this process got the
    message, `returned` (when it last went back, as the server has it) those that anybody did. `owed` is how it ends on
    a server that has not been told since the work was over ("" for not at all), `owed_at` since when (monotonic
    seconds; -inf: it could not be told). `over_at` is when the work ended (monotonic seconds), which is settled soon
    after. `used` is the signature of its message, where signatures are checked.
    `returning` is true from the moment at which a message that has not begun is put back, `requeueing` from the moment
    at which the supervisor of one that has begun asks the server to requeue it.
    """

    queue: str
    delivery: int = 0
    list_key: str = ""
    raw: str = ""
    used: Used | None = None
    returned: str = NEVER
    started: bool = False
    returning: bool = False
    requeueing: bool = False
    owed: str = ""
    owed_at: float = -math.inf
    over_at: float = math.inf
    task: str = ""
    attempt: int | None = None
    beat_at: float | None = None
    on_lost: list[Callable[[], None]] = field(default_factory=list)


#: Takes back leases that nobody holds: tag -> lease, and whether the server run is new; returns the tags now held.
Reclaim = Callable[[Mapping[str, Lease], bool], set[str]]


def new_token() -> str:
    """Return a token that no other process has."""
    return uuid.uuid4().hex
