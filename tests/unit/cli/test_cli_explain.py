"""What the registry tells of workers becomes views, and views become warnings at submit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gpuflow.errors import InvalidTemplate, NoCapableWorker
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.fleet.worker_views import view_of
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.placement import HostUsage
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.situation import judge
from gpuflow.routing.views import TaskView, WorkerView
from gpuflow.spec import parse
from gpuflow.submission_checks import can_serve, problem_of, problems_at_submit

A100 = Capability(
    gpus=(GpuCapability(uuid="g", index=0, names=("a100",), vram_gb=80, total_mib=81_000),), memory_mib=1024
)
ASK = Requirement(gpu_count=1, gpu_names=("a100",))
NOW = 1_000_000.0


def entry(*queues: str, load: dict[str, Any] | None = None, **fields: Any) -> WorkerEntry:
    given: dict[str, Any] = {"state": WorkerState.IDLE, "capability": A100.to_dict(), **fields}
    return WorkerEntry(id="w", queues=queues, load=load or {}, **given)


def kind(worker: WorkerEntry, ask: Requirement = ASK) -> str:
    return judge(ask, ask.queue_name(), TaskView(name="t"), view_of(worker, {}, NOW)).kind


@pytest.mark.parametrize(
    "queues", [("gpuflow.control", "tasks"), ("gpuflow.control", "gpu-a100"), ("gpu",), ("gpu-a100", "tasks")]
)
def test_a_worker_of_an_older_version_serves_what_its_queues_cover(queues: tuple[str, ...]) -> None:
    assert kind(entry(*queues)) == "free"


def test_q_disabled_and_drain_keep_a_worker_away() -> None:
    assert kind(entry("gpuflow.control", "gpu-h100")) == "restricted"
    assert kind(entry("tasks", load={"families": ["gpu-h100"]})) == "restricted"
    assert kind(entry("gpuflow.control", load={"families": None})) == "free"
    assert kind(entry("tasks", enabled=False)) == "disabled"
    assert kind(entry("tasks", state=WorkerState.DRAINING)) == "draining"
    assert kind(entry("tasks"), Requirement(gpu_count=1, gpu_names=("h100",))) == "unfit"


def test_all_that_a_worker_tells_is_in_its_view() -> None:
    load = {
        "families": ["gpu-a100", "cpu"],
        "executors": ["echo", "inference"],
        "freeGpus": ["g"],
        "sessions": [
            {"model": "warm", "idle": True, "gpus": ["h"]},
            {"model": "at-work", "idle": False, "gpus": ["i"]},
        ],
        "freeJobs": 2,
        "usage": {"cpus": 2.0, "memory_mib": 512, "undeclared_jobs": 1, "undeclared_limit": 4, "of_a_newer_version": 1},
        "foreignMib": {"g": 3000},
        "roomMib": {"g": 4000},
        "reservation": {"task": "big", "queue": "gpu-2", "gpus": ["g"], "secondsLeft": 70.0},
        "diskFreeMib": 5000,
    }
    records = {
        name: TaskRecord(id=name, state=state, name=f"{name}-job", created_at=NOW - 30, started_at=NOW - 60)
        for name, state in (("big", TaskState.QUEUED), ("small", TaskState.RUNNING))
    }
    two = replace(A100, gpus=(*A100.gpus, replace(A100.gpus[0], uuid="h", index=1)))
    worker = entry(
        "tasks",
        load=json.loads(json.dumps(load)),
        tasks=("small", "unknown"),
        heartbeat_at=NOW - 5,
        capability=two.to_dict(),
    )

    view = view_of(worker, records, NOW)

    assert view.families == ("gpu-a100", "cpu")
    assert view.executors == ("echo", "inference")
    assert (view.free_gpus, view.free_jobs, view.silent_seconds) == (("g", "h"), 2, 5)
    assert (dict(view.foreign_mib), view.room_mib) == ({"g": 3000}, {"g": 4000, "h": 81_000})
    assert view.usage == HostUsage(cpus=2.0, memory_mib=512, undeclared_jobs=1, undeclared_limit=4)
    assert view.reservation is not None
    assert (view.reservation.name, view.reservation.seconds) == ("big-job", 30)
    assert (view.reservation.queue, view.reservation.seconds_left) == ("gpu-2", 70.0)
    assert [(task.id, task.name, task.seconds) for task in view.tasks] == [
        ("small", "small-job", 60),
        ("unknown", "", None),
    ]
    assert view.capability.disk_free_mib == 5000


def test_a_newer_worker_is_read_as_far_as_it_is_understood() -> None:
    newer = {**A100.to_dict(), "schema": 99, "quantum": True}
    assert view_of(entry("tasks", capability=newer), {}, NOW).capability == A100


def worker(name: str = "box1", **fields: Any) -> WorkerView:
    return WorkerView(**{"id": name, "capability": A100, **fields})


H100 = Requirement(gpu_count=1, gpu_names=("h100",))


@pytest.mark.parametrize(
    ("alternatives", "workers", "problem"),
    [
        ((ASK,), [worker()], None),
        ((ASK,), [worker(state="BUSY", free_gpus=())], None),
        ((H100, ASK), [worker()], None),
        ((ASK,), [], "no worker is there to run 'tune' (1 GPU (a100)); it waits until one is"),
        ((ASK,), [worker(state="OFFLINE")], "no worker is there to run 'tune' (1 GPU (a100)); it waits until one is"),
        (
            (H100,),
            [worker()],
            "no live worker can run 'tune': the nearest is box1, but the task asks for h100, the worker has 1x a100",
        ),
        (
            (ASK,),
            [worker(families=("gpu-h100",)), worker("box2", families=("cpu",))],
            "only their -Q keeps box1, box2 from running 'tune'; start a worker without -Q, or with -Q gpu-a100",
        ),
        (
            (ASK,),
            [worker(enabled=False)],
            "no worker takes 'tune' now: box1 is disabled: it takes nothing until it is enabled again; "
            "it waits until one does",
        ),
    ],
)
def test_what_is_told_at_submit(
    alternatives: tuple[Requirement, ...], workers: list[WorkerView], problem: str | None
) -> None:
    assert problem_of("tune", "echo", alternatives, workers) == problem


class FakeFleet:
    """An app whose registry holds given workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *workers: WorkerView) -> None:
        self.redis = self.keys = None
        self.workers = list(workers)
        self.reads = 0
        monkeypatch.setattr("gpuflow.submission_checks.worker_views", self._read)

    def _read(self, *_: Any) -> list[WorkerView]:
        self.reads += 1
        return self.workers


def template(*asks: Any) -> Any:
    stages = [
        {"name": f"s{n}", "spec": {"taskType": "echo", "resources": {"accelerators": ask}}}
        for n, ask in enumerate(asks)
    ]
    return parse({"apiVersion": "gpuflow/v1", "spec": {"stages": stages}})


def test_a_loop_of_submits_is_warned_once_and_reads_the_registry_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = FakeFleet(monkeypatch, worker())
    told = [problems_at_submit(app, template("H100", "A100", "T4")) for _ in range(50)]
    assert [len(problems) for problems in told] == [2] + [0] * 49
    assert "'s0'" in told[0][0]
    assert app.reads < 50


def test_fail_fast_names_every_stage_and_looks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = FakeFleet(monkeypatch, worker())
    problems_at_submit(app, template("H100"))
    with pytest.raises(NoCapableWorker, match=r"'s0'.*; .*'s1'"):
        problems_at_submit(app, template("H100", "T4"), fail_fast=True)
    assert problems_at_submit(app, template("A100"), fail_fast=True) == []
    assert app.reads >= 2


def test_fail_fast_says_that_nothing_was_submitted_and_not_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = FakeFleet(monkeypatch)
    with pytest.raises(NoCapableWorker, match=r"^no worker is there to run 's0' \(.*\); nothing was submitted$"):
        problems_at_submit(app, template("A100"), fail_fast=True)


def test_can_serve_wants_a_worker_for_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = FakeFleet(monkeypatch, worker(state="BUSY", free_gpus=()))
    assert can_serve(app, template("A100", ["H100", "A100"]))
    assert not can_serve(app, template("A100", "H100"))
    app.workers = []
    assert not can_serve(app, template("A100"))


def test_a_stage_whose_ask_has_no_meaning_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = FakeFleet(monkeypatch, worker())
    with pytest.raises(InvalidTemplate, match=r"stage 's1': accelerators 'A100::2'.*column 6"):
        problems_at_submit(app, template("A100", "A100::2"))


def test_a_broker_that_is_away_is_left_to_the_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> list[WorkerView]:
        raise ConnectionRefusedError

    app: Any = FakeFleet(monkeypatch)
    monkeypatch.setattr("gpuflow.submission_checks.worker_views", away)
    assert problems_at_submit(app, template("A100"), fail_fast=True) == []
