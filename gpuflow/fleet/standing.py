"""How a worker stands, in one list for all who show it or count on it. Pure.

`gpuflow workers`, `queues`, `doctor`, `status --watch`, the gateway, the monitor and the metrics say what stands here,
in these words; `gpuflow explain` says of each task what keeps a worker from it (`routing.situation`), of which those
that take nothing are a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.fleet.worker_views import capability_of
from gpuflow.ledger.records import RECORD_SCHEMA
from gpuflow.routing.describe import ago
from gpuflow.routing.situation import disk_full_text
from gpuflow.terminal import one_line

#: A clock that is off by less is not told of, in seconds: it is compared with what a heartbeat's way takes.
SKEW_SECONDS: Final = 5.0
#: Memory is low when less of it is left than this share, or than so many MiB.
LOW_MEMORY_SHARE: Final = 0.03
LOW_MEMORY_MIB: Final = 512
#: Letters of a cause that another machine has written.
_CAUSE: Final = 200

#: In the order in which they are told.
Kind = Literal[
    "offline", "silent", "draining", "disabled", "connecting", "disk-full",
    "no-driver", "gpu-problem", "low-memory", "clock-skewed", "outdated",
]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = Kind.__args__  # type: ignore[attr-defined]
#: While one of these lasts, a worker takes nothing new.
_TAKES_NOTHING: Final = frozenset({"offline", "silent", "draining", "disabled", "connecting", "disk-full"})
#: What somebody has ordered, and may have said why.
_ORDERED: Final = frozenset({"draining", "disabled"})
#: What nobody ordered, and what does not pass by itself.
_NEEDS_A_LOOK: Final = frozenset(
    {"silent", "disk-full", "no-driver", "gpu-problem", "low-memory", "clock-skewed", "outdated"}
)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One thing that is to be known of a worker. `text` goes on after its name: "is silent: last heard of 12 s ago"."""

    kind: Kind
    text: str

    @property
    def takes_nothing(self) -> bool:
        """Whether the worker takes nothing new while this lasts."""
        return self.kind in _TAKES_NOTHING

    @property
    def needs_a_look(self) -> bool:
        """Whether somebody should look after the machine."""
        return self.kind in _NEEDS_A_LOOK

    @property
    def label(self) -> str:
        """Its name for a table: "disk full"."""
        return self.kind.replace("-", " ")

    def public(self) -> dict[str, Any]:
        """Return what users see, JSON-able."""
        return {"kind": self.kind, "text": self.text, "takesNothing": self.takes_nothing}


def standings(entry: WorkerEntry) -> tuple[Standing, ...]:
    """Return what is to be known of a worker beside IDLE and BUSY, the weightiest first; none: all is well.

    Of one that has gone nothing else is told. Raises what reading a part of the entry raises that another machine has
    written (`registry.UNREADABLE`).
    """
    if entry.state is WorkerState.OFFLINE:
        went = "has stopped" if entry.stopped else "has gone"
        return (Standing(kind="offline", text=f"{went}{_heard(entry)}"),)
    found: dict[Kind, str] = {}
    if entry.state is WorkerState.SILENT:
        found["silent"] = f"is silent{_heard(entry)}"
    if entry.drains:
        found["draining"] = _with(entry.desired.text() if entry.desired.ends else "", "is draining")
    elif not entry.takes_work:
        found["disabled"] = _with(entry.desired.text(), "is disabled")
    if entry.state is WorkerState.CONNECTING:
        found["connecting"] = "is connecting to the broker"
    found |= _machine(entry)
    return tuple(Standing(kind=kind, text=found[kind]) for kind in KINDS if kind in found)


def takes_new(entry: WorkerEntry) -> bool:
    """Whether a worker takes new work, as far as it can be known from its entry; a full one will when it has room."""
    return not any(one.takes_nothing for one in standings(entry))


def state_text(entry: WorkerEntry) -> str:
    """Return the state for a table: `BUSY, disk full`, `DRAINING (by hand: asked for)`."""
    state, others = str(entry.state), []
    for one in standings(entry):
        told = one.text.removeprefix("is ") if one.kind in _ORDERED else one.label
        if one.label.upper() == state:
            state += told.removeprefix(one.label)
        else:
            others.append(told)
    if entry.desired.by_hand and entry.takes_work and not entry.desired.ends:
        others.append("enabled by hand")
    return ", ".join([state, *others])


def public(entry: WorkerEntry) -> dict[str, Any]:
    """Return what users see of a worker, JSON-able."""
    shown = entry.public()
    return {"id": shown.pop("id"), "state": shown.pop("state"), "standing": [one.public() for one in standings(entry)],
            **shown}  # fmt: skip


def unreadable_text(ids: Sequence[str]) -> str:
    """Return what is told of workers whose entries this version cannot read."""
    named = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
    whose = "the entry of" if len(ids) == 1 else "the entries of"
    return f"{whose} {named} cannot be read by this version: a newer gpuflow runs there, or something else wrote it"


def by_kind(entries: Iterable[WorkerEntry]) -> dict[Kind, list[tuple[str, Standing]]]:
    """Return the workers of each kind, with their ids, kinds in the order in which they are told."""
    found: dict[Kind, list[tuple[str, Standing]]] = {kind: [] for kind in KINDS}
    for entry in entries:
        for one in standings(entry):
            found[one.kind].append((entry.id, one))
    return {kind: workers for kind, workers in found.items() if workers}


def heard_seconds(entry: WorkerEntry) -> float | None:
    """Return how long ago a worker was last heard of; of one that has gone, as far as its own clock was right."""
    if entry.seen_seconds is not None or entry.read_at is None or not entry.heartbeat_at:
        return entry.seen_seconds
    return max(0.0, entry.read_at - entry.heartbeat_at)


def _machine(entry: WorkerEntry) -> dict[Kind, str]:
    found: dict[Kind, str] = {}
    capability = capability_of(entry)
    if capability.lacks_disk:
        found["disk-full"] = disk_full_text(capability)
    driver, problems = entry.load.get("driverProblem"), _texts(entry.load.get("gpuProblems"))
    if driver:
        found["no-driver"] = f"has a GPU that cannot be used: {one_line(driver, _CAUSE)}"
    if problems:
        found["gpu-problem"] = "; ".join(one_line(text, _CAUSE) for text in problems[:3])
    left, memory = _number(entry.load.get("memoryAvailableMib")), capability.memory_mib
    if left is not None and memory and left < max(LOW_MEMORY_SHARE * memory, min(LOW_MEMORY_MIB, memory / 10)):
        found["low-memory"] = f"has {left:.0f} MiB of {memory} MiB memory left"
    skew = entry.skew_seconds
    if skew is not None and abs(skew) >= SKEW_SECONDS:
        found["clock-skewed"] = (
            f"has a clock that is {ago(abs(skew))} {'ahead of' if skew > 0 else 'behind'} the broker's"
        )
    protocol = entry.load.get("protocol")
    record = protocol.get("record") if isinstance(protocol, Mapping) else None
    if isinstance(record, int) and record < RECORD_SCHEMA:
        version = f" ({one_line(entry.version.partition('+')[0], 40)})" if entry.version else ""
        found["outdated"] = f"has an older gpuflow{version} than this one, and leaves newer tasks to others"
    return found


def _heard(entry: WorkerEntry) -> str:
    seconds = heard_seconds(entry)
    return "" if seconds is None else f": last heard of {ago(seconds)} ago"


def _with(why: str, text: str) -> str:
    return f"{text} ({one_line(why, _CAUSE)})" if why else text


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _texts(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []
