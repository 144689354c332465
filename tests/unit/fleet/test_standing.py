"""How a worker stands: each condition, its words, and that `explain` keeps the same workers away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.fleet.desired import AUTOMATIC, MANUAL, Desired, DesiredState
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.fleet.standing import KINDS, by_kind, public, standings, state_text, takes_new, unreadable_text
from gpuflow.fleet.worker_views import view_of
from gpuflow.ledger.records import RECORD_SCHEMA
from gpuflow.routing.capability import Capability
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.situation import PASSING, judge
from gpuflow.routing.views import TaskView

LOAD = {"memoryAvailableMib": 30_000, "diskFreeMib": 5_000, "protocol": {"record": RECORD_SCHEMA}, "freeJobs": 1,
        "families": None}  # fmt: skip


def worker(state: WorkerState = WorkerState.IDLE, *, desired: Desired | None = None, **load: Any) -> WorkerEntry:
    able = Capability(cpu_count=8, memory_mib=65_536, disk_free_mib=5_000, disk_floor_mib=1_000)
    return WorkerEntry(
        id="w1", state=state, capability=able.to_dict(), load={**LOAD, **load}, seen_seconds=3.0, skew_seconds=0.2,
        version="0.1.0", desired=desired or Desired(),
    )  # fmt: skip


def ordered(state: DesiredState, by: str = MANUAL, reason: str = "a new disk") -> Desired:
    return Desired(state=state, by=by, reason=reason, at=1.0)


CASES: list[tuple[WorkerEntry, str, str]] = [
    (
        replace(worker(WorkerState.OFFLINE), seen_seconds=None, heartbeat_at=1000.0, read_at=1075.0),
        "offline",
        "has gone: last heard of 1 min ago",
    ),
    (
        replace(worker(WorkerState.OFFLINE), stopped=True, seen_seconds=None, heartbeat_at=1000.0, read_at=1075.0),
        "offline",
        "has stopped: last heard of 1 min ago",
    ),
    (replace(worker(WorkerState.SILENT), seen_seconds=75.0), "silent", "is silent: last heard of 1 min ago"),
    (worker(WorkerState.DRAINING), "draining", "is draining"),
    (worker(desired=ordered(DesiredState.RETIRED)), "draining", "is draining (by hand: a new disk)"),
    (worker(desired=ordered(DesiredState.DISABLED)), "disabled", "is disabled (by hand: a new disk)"),
    (worker(WorkerState.CONNECTING), "connecting", "is connecting to the broker"),
    (worker(diskFreeMib=999), "disk-full", "has 999 MiB of disk free, less than its floor of 1000 MiB"),
    (worker(driverProblem="no \x1b[31mlibrary\nof NVML"), "no-driver", "has a GPU that cannot be used: no library"),
    (worker(gpuProblems=["GPU 1 is lost"]), "gpu-problem", "GPU 1 is lost"),
    (worker(memoryAvailableMib=500), "low-memory", "has 500 MiB of 65536 MiB memory left"),
    (replace(worker(), skew_seconds=-90.0), "clock-skewed", "has a clock that is 1 min behind the broker's"),
    (worker(protocol={"record": RECORD_SCHEMA - 1}), "outdated", "has an older gpuflow (0.1.0) than this one"),
]


@pytest.mark.parametrize(("entry", "kind", "text"), CASES, ids=[kind for _, kind, _ in CASES])
def test_each_condition_has_its_words(entry: WorkerEntry, kind: str, text: str) -> None:
    (found,) = standings(entry)
    assert found.kind == kind
    assert found.text.startswith(text) and "\x1b" not in found.text and "\n" not in found.text
    assert by_kind([entry]) == {kind: [("w1", found)]}
    assert public(entry)["standing"] == [{"kind": kind, "text": found.text, "takesNothing": found.takes_nothing}]


def test_every_kind_has_a_case() -> None:
    assert {kind for _, kind, _ in CASES} == set(KINDS)


def test_of_a_worker_that_is_well_nothing_is_told() -> None:
    assert standings(worker()) == standings(worker(WorkerState.BUSY)) == ()
    assert takes_new(worker(WorkerState.BUSY)), "it will, when it has room"
    assert state_text(worker()) == "IDLE"


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (worker(WorkerState.BUSY, diskFreeMib=1), "BUSY, disk full"),
        (worker(WorkerState.DRAINING, desired=ordered(DesiredState.DRAINING)), "DRAINING (by hand: a new disk)"),
        (worker(WorkerState.BUSY, desired=ordered(DesiredState.DISABLED, AUTOMATIC)),
         "BUSY, disabled (by autoscale: a new disk)"),
        (worker(desired=ordered(DesiredState.ENABLED)), "IDLE, enabled by hand"),
        (worker(WorkerState.SILENT, memoryAvailableMib=1), "SILENT, low memory"),
    ],
)  # fmt: skip
def test_the_state_of_a_table_tells_all_of_it(entry: WorkerEntry, text: str) -> None:
    assert state_text(entry) == text


def test_unreadable_entries_are_named() -> None:
    assert unreadable_text(["w1"]).startswith("the entry of w1 cannot be read")
    assert unreadable_text([f"w{n}" for n in range(7)]).startswith("the entries of w0, w1, w2, w3, w4 and 2 more")


@given(
    state=st.sampled_from(WorkerState),
    desired=st.sampled_from(DesiredState),
    disk=st.sampled_from([0, 999, 1000, 5_000]),
    memory=st.sampled_from([0, 500, 30_000]),
)
def test_explain_keeps_away_exactly_those_that_take_nothing(
    state: WorkerState, desired: DesiredState, disk: int, memory: int
) -> None:
    entry = worker(state, desired=ordered(desired), diskFreeMib=disk, memoryAvailableMib=memory)
    view = view_of(entry, {}, now=1000.0)
    judged = judge(Requirement(), "cpu", TaskView(name="t", executor=""), view)
    assert takes_new(entry) is (judged.kind in PASSING - {"connecting"}), (judged, standings(entry))
