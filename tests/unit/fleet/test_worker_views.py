"""Workers of one machine share its GPUs: what the one that looked last saw of them counts for all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from gpuflow.fleet.registry import Fleet, WorkerEntry, WorkerState
from gpuflow.fleet.worker_views import view_of, worker_views
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.situation import judge
from gpuflow.routing.views import TaskView

BOTH = ("GPU-0", "GPU-1")


def worker(
    name: str, at: float, free: tuple[str, ...], *, gpus: tuple[str, ...] = BOTH, directory: str = "locks"
) -> WorkerEntry:
    """Return the entry of a worker that has these GPUs and saw these of them free at that time."""
    capability = Capability(
        gpus=tuple(GpuCapability(uuid=uuid, index=0, names=("l4",), vram_gb=24, total_mib=24_000) for uuid in gpus)
    )
    load: dict[str, Any] = {
        "families": None,
        "freeGpus": list(free),
        "roomMib": {uuid: 24_000 if uuid in free else 0 for uuid in gpus},
        "gpusSeenAt": at,
        "locks": {"machine": "boot-1", "directory": directory, "path": "/locks"},
    }
    return WorkerEntry(id=name, state=WorkerState.IDLE, capability=capability.to_dict(), load=load)


def kinds(*entries: WorkerEntry, ask: Requirement) -> dict[str, str]:
    class Registry:
        def workers(self) -> list[WorkerEntry]:
            return list(entries)

    views = worker_views(cast("Fleet", Registry()), None, 0.0)
    return {view.id: judge(ask, "gpu", TaskView(name="t"), view).kind for view in views}


WHOLE, SHARE = Requirement(gpu_count=1), Requirement(gpu_count=1, gpu_share=0.5)


@pytest.mark.parametrize("ask", [WHOLE, SHARE])
def test_what_another_worker_of_the_machine_took_later_is_not_free(ask: Requirement) -> None:
    early, late = worker("a", 1.0, BOTH), worker("b", 2.0, ())

    assert kinds(early, ask=ask) == {"a": "free"}
    assert kinds(early, late, ask=ask)["a"] != "free"


@pytest.mark.parametrize("ask", [WHOLE, SHARE])
def test_what_it_gave_back_later_is_free(ask: Requirement) -> None:
    assert kinds(worker("a", 1.0, ()), worker("b", 2.0, BOTH), ask=ask) == {"a": "free", "b": "free"}


def test_other_machines_and_gpus_that_are_not_its_own_say_nothing() -> None:
    elsewhere = worker("b", 2.0, (), directory="other")
    part = worker("c", 2.0, (), gpus=("GPU-1",))

    assert kinds(worker("a", 1.0, BOTH), elsewhere, ask=WHOLE)["a"] == "free"
    assert kinds(worker("a", 1.0, BOTH), part, ask=WHOLE)["a"] == "free"
    assert kinds(worker("a", 1.0, ("GPU-1",)), part, ask=WHOLE)["a"] == "busy"


@pytest.mark.parametrize(("state", "kept"), [("QUEUED", True), ("STARTING", False), ("SUCCEEDED", False)])
def test_a_reservation_counts_as_long_as_its_task_waits(state: str, kept: bool) -> None:
    entry = worker("a", 1.0, BOTH)
    entry = replace(entry, load={**entry.load, "reservation": {"task": "t1", "gpus": ["GPU-0"]}})
    record = TaskRecord(id="t1", name="big", state=TaskState(state), attempt=0)

    assert (view_of(entry, {"t1": record}, 0.0).reservation is not None) is kept
    assert view_of(entry, {}, 0.0).reservation is not None
    newer = replace(record, state=TaskState.QUEUED, requirement={"schema": 99, "gpu_count": "many"})
    found = view_of(entry, {"t1": newer}, 0.0).reservation
    assert found is not None
    assert found.asked is None


@pytest.mark.parametrize(
    "fields",
    [
        {"load": {**worker("a", 3.0, ()).load, "roomMib": {"GPU-0": "much"}}},
        {"capability": {"gpus": ["x"]}},
        {"capability": {"gpus": [{"uuid": "u", "total_mib": "many"}]}},
        {"capability": worker("a", 1.0, BOTH).capability | {"memory_mib": "much"}},
        {"load": {"roomMib": {"GPU-0": "much"}}},
        {"load": {"sessions": 3, "freeGpus": []}},
        {"load": {"usage": {"cpus": "all"}}},
        {"load": {"sessions": [{"idle": True, "gpus": ["GPU-0"], "shareMib": "half"}], "freeGpus": []}},
    ],
)
def test_a_worker_whose_entry_cannot_be_read_is_left_out(fields: dict[str, Any]) -> None:
    odd = replace(worker("odd", 3.0, BOTH), **fields)

    assert kinds(odd, worker("a", 1.0, BOTH), ask=WHOLE) == {"a": "free"}


def test_what_cannot_be_read_says_nothing_of_other_workers_of_its_machine() -> None:
    odd = worker("odd", 3.0, ())
    odd = replace(odd, load={**odd.load, "gpusSeenAt": 10**400})

    assert kinds(odd, worker("a", 1.0, BOTH), ask=WHOLE)["a"] == "free"


@pytest.mark.parametrize(("said", "left_ms"), [("OFFLINE", -2), ("BUSY", -2)], ids=["stopped", "lost"])
def test_a_worker_that_has_gone_runs_nothing_whatever_it_said_last(said: str, left_ms: int) -> None:
    last = WorkerEntry(id="w1", state=WorkerState.BUSY, tasks=("t1", "t2"), load={"jobs": 2, "freeJobs": 0})
    raw = {**last.to_hash(), "state": said, "newer_load": json.dumps({"startedAt": 0.0, "load": {"jobs": 3}})}

    there, gone = (WorkerEntry.from_hash(raw | {"state": state}, left_ms=left)
                   for state, left in (("BUSY", 1000), (said, left_ms)))  # fmt: skip

    assert (there.tasks, there.load["jobs"]) == (("t1", "t2"), 3)
    assert (gone.state, gone.tasks, gone.load["jobs"]) == (WorkerState.OFFLINE, (), 0)
    assert gone.public()["tasks"] == [] and view_of(gone, {}, now=1000.0).tasks == ()
