"""What children of the task type `echo` tell themselves: which GPUs they saw, and from when to when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

#: To be given to `echo`, so that its result says which GPUs it saw.
REPORT = ("CUDA_VISIBLE_DEVICES",)


@dataclass(frozen=True, kw_only=True)
class Span:
    """One child: its GPUs (UUIDs), and from when to when it ran (Unix seconds); `mib` of each GPU, None for all."""

    name: str
    gpus: tuple[str, ...]
    began_at: float
    ended_at: float
    mib: int | None = None

    @property
    def gpu_seconds(self) -> float:
        return len(self.gpus) * (self.ended_at - self.began_at)


def span(name: str, result: Mapping[str, Any], mib: int | None = None) -> Span:
    """Read the result of an echo child."""
    visible = result["environment"]["CUDA_VISIBLE_DEVICES"] or ""
    return Span(
        name=name,
        gpus=tuple(part for part in visible.split(",") if part),
        began_at=result["began_at"],
        ended_at=result["ended_at"],
        mib=mib,
    )


def double_bookings(spans: Iterable[Span], capacity_mib: Mapping[str, int] | None = None) -> list[str]:
    """Return every moment at which a GPU was held by two children, or by shares that are larger than it, in words."""
    by_gpu: dict[str, list[Span]] = {}
    for one in spans:
        for uuid in one.gpus:
            by_gpu.setdefault(uuid, []).append(one)
    found = []
    for uuid, users in by_gpu.items():
        users.sort(key=lambda one: one.began_at)
        if all(one.mib is None for one in users):
            found += [f"{uuid}: {a.name} and {b.name}" for a, b in pairwise(users) if b.began_at < a.ended_at]
            continue
        capacity = (capacity_mib or {})[uuid]
        for one in users:
            beside = [other for other in users if other.began_at <= one.began_at < other.ended_at]
            if sum(capacity if other.mib is None else other.mib for other in beside) > capacity:
                found.append(f"{uuid}: {', '.join(other.name for other in beside)}")
    return found


def of_sessions(spans: Iterable[Span]) -> list[Span]:
    """Return the spans of warm functions as those of their processes: calls that overlap on a GPU share one."""
    found: list[Span] = []
    for one in sorted(spans, key=lambda one: one.began_at):
        last = next((other for other in reversed(found) if other.gpus == one.gpus), None)
        if last is not None and one.began_at < last.ended_at:
            ended_at = max(last.ended_at, one.ended_at)
            found[found.index(last)] = replace(last, name=f"{last.name}+{one.name}", ended_at=ended_at)
        else:
            found.append(one)
    return found
