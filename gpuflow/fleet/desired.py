"""What a worker is to be: enabled, disabled, draining or retired, by whom and why. Kept in its entry in Redis.

An operator's word stands until it is released; the autoscaler writes only where none stands (lua/desire.lua).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

#: By whom it was written.
MANUAL: Final = "manual"
AUTOMATIC: Final = "autoscale"
#: So many decisions are kept.
MOST_DECISIONS: Final = 500


class DesiredState(StrEnum):
    """What a worker is to be. RETIRED is DRAINING for a machine that is terminated afterwards."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    DRAINING = "draining"
    RETIRED = "retired"


@dataclass(frozen=True, kw_only=True)
class Desired:
    """What a worker is to be; `at` is Unix seconds on the server's clock, None: nobody has ever said."""

    state: DesiredState = DesiredState.ENABLED
    by: str = ""
    reason: str = ""
    at: float | None = None

    @property
    def ends(self) -> bool:
        """Whether the worker is to end."""
        return self.state in (DesiredState.DRAINING, DesiredState.RETIRED)

    @property
    def by_hand(self) -> bool:
        """Whether an operator said so."""
        return self.by == MANUAL

    @classmethod
    def from_hash(cls, raw: Mapping[str, str]) -> Desired:
        """Read it from a worker's entry; what is not understood counts as enabled, an older version's drain as that."""
        text = raw.get("desired") or ("draining" if raw.get("wanted") == "drain" else "enabled")
        known = text in DesiredState.__members__.values()
        return cls(
            state=DesiredState(text) if known else DesiredState.ENABLED,
            by=raw.get("desired_by", ""),
            reason=raw.get("desired_reason", ""),
            at=float(raw["desired_at"]) if raw.get("desired_at") else None,
        )

    def text(self) -> str:
        """Return who wants it and why, for people: `by autoscale: it has idled for 61 s`."""
        who = "by hand" if self.by_hand else f"by {self.by}" if self.by else ""
        return ": ".join(filter(None, [who, self.reason]))

    def public(self) -> dict[str, Any]:
        """Return what users see, JSON-able."""
        return {"state": str(self.state), "by": self.by, "reason": self.reason, "at": self.at}
