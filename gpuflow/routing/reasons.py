"""One requirement that a worker fails, in words and in a number. Made by `gpuflow.routing.fit`, shown by `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ReasonKind = Literal["gpu_name", "vram", "gpu_count", "compute_capability", "share", "cpu", "memory", "disk", "label"]


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One requirement that fails: what is asked, what the worker has, and both as a clause for people.

    `gap` is the part of what is asked for that is missing, 0 to 1; 1 where there is nothing to measure.
    """

    kind: ReasonKind
    asked: str
    has: str
    message: str
    gap: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"kind": self.kind, "asked": self.asked, "has": self.has, "message": self.message}


def reason(kind: ReasonKind, asked: str, has: str, clause: str, missing: float = 1.0) -> Reason:
    """Return a reason; `clause` says what the worker has."""
    return Reason(kind=kind, asked=asked, has=has, message=f"asks for {asked}, {clause}", gap=missing)


def gap(asked: float, has: float) -> float:
    """Return how far apart two amounts are, as a part of the larger one, 0 to 1."""
    most = max(asked, has)
    return abs(asked - has) / most if most > 0 else 1.0
