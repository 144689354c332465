"""What a token may do. Pure: `Grant` is what a checked token stands for, `Right` what an action needs.

| role | may |
|---|---|
| viewer | read |
| submitter | also submit, and cancel, retry and resume what it may read |
| operator | all of that for every owner, and drain, enable and disable workers |
| admin | also make and revoke tokens |

A viewer or submitter reads and submits as its `owner` alone; one without an owner does so for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """What a person may do; each role includes those before it."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    ADMIN = "admin"


class Right(StrEnum):
    """What an action needs."""

    #: Nothing but a token that is valid, also of a worker.
    ANY = "any"
    READ = "read"
    SUBMIT = "submit"
    #: Reading what is not of one owner: counts of the whole fleet.
    READ_ALL = "read-all"
    STEER = "steer"
    ADMIN = "admin"
    #: Files of results: the route decides by the task and its owner; workers have it too.
    FILES = "files"


_ORDER: Final = tuple(Role)
_LEAST: Final = {
    Right.ANY: Role.VIEWER,
    Right.FILES: Role.VIEWER,
    Right.READ: Role.VIEWER,
    Right.READ_ALL: Role.VIEWER,
    Right.SUBMIT: Role.SUBMITTER,
    Right.STEER: Role.OPERATOR,
    Right.ADMIN: Role.ADMIN,
}
_OF_WORKERS: Final = frozenset({Right.ANY, Right.FILES})


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a checked token stands for. `digest` is that of the token, '' for the one token of the fleet.

    `owner` None: no owner of its own. `worker` is the name of the worker whose token it is, '' for a person.
    """

    role: Role
    owner: str | None = None
    worker: str = ""
    token_id: str = ""
    digest: str = ""

    @property
    def scope(self) -> str | None:
        """Return the owner whose work alone it sees; None: that of all."""
        return None if self.role in (Role.OPERATOR, Role.ADMIN) else self.owner

    @property
    def actor(self) -> str:
        """Return how logs name who did something."""
        if self.worker:
            return f"worker:{self.worker}"
        return f"token:{self.token_id}" if self.token_id else "fleet-token"

    def may(self, right: Right) -> bool:
        """Say whether it has a right."""
        if self.worker:
            return right in _OF_WORKERS
        if right is Right.READ_ALL and self.scope is not None:
            return False
        return _ORDER.index(self.role) >= _ORDER.index(_LEAST[right])

    def sees(self, owner: str) -> bool:
        """Say whether it may read what an owner has."""
        return not self.worker and (self.scope is None or self.scope == owner)

    def submits_as(self, owner: str) -> str | None:
        """Return as whom it submits work that names this owner ('' for none); None: it may not."""
        if self.scope is not None:
            return self.scope if owner in ("", self.scope) else None
        return owner or self.owner or ""


#: What the one token of the fleet (GPUFLOW_WORKER_TOKEN of the gateway) stands for.
FLEET: Final = Grant(role=Role.ADMIN)
