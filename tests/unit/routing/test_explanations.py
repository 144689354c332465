"""Why a task waits, told to somebody who has never seen the code: the texts of real situations, and the JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_routing import requirements
from test_fit import machine

from gpuflow.routing.explain import MAX_LISTED, explain
from gpuflow.routing.offers import Lack, Offers
from gpuflow.routing.placement import HostUsage
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.resources import requirement_from_resources
from gpuflow.routing.views import QueueView, Reservation, RunningTask, TaskView, WorkerView

GOLDEN = Path(__file__).parent / "golden" / "explain"
TRAIN = RunningTask(id="7aa1", name="train-7b", seconds=730)
BATCH = RunningTask(id="51f0", name="embed-docs", seconds=65)
TASK = TaskView(id="4f1c", name="tune", state="QUEUED", executor="lora_sft")


NO_VLLM = Offers(
    names=frozenset({"inference", "echo"}),
    lacking={"inference:vllm": Lack(why="environment vllm (cpu) is not built", mend="`gpuflow env create vllm`")},
)


def view(name, *cards, labels=None, **fields):
    return WorkerView(id=name, capability=machine(*cards, labels=labels), **fields)


def busy(name, *cards, **fields):
    return view(name, *cards, **{"state": "BUSY", "free_gpus": (), "tasks": (TRAIN,), **fields})


def with_disk(worker, *, free_mib, floor_mib):
    return replace(worker, capability=replace(worker.capability, disk_free_mib=free_mib, disk_floor_mib=floor_mib))


def told(resources, *workers, task=TASK, depth=1, place=1, oldest=130):
    (ask,) = requirement_from_resources(resources, gpu_available=True)
    queue = QueueView(name=ask.queue_name(), depth=depth, place=place, oldest_seconds=oldest)
    return explain(ask, task, queue, workers)


SITUATIONS = {
    "too-little-vram": lambda: told(
        "80GB:1", view("attic", "t4"), view("box1", "a100-40", "a100-40"), view("lab", "4090", "4090")
    ),
    "wrong-type": lambda: told("A100:2", view("box1", "h100", "h100"), view("lab", "4090", "t4")),
    "label-glob": lambda: told(
        {"accelerators": "24GB", "labels": {"location": "us-*", "team": "nlp"}},
        view("berlin", "4090", labels={"location": "eu-1", "team": "nlp"}),
        view("boston", "4090", labels={"location": "us-2"}),
        view("cave", "4090"),
    ),
    "all-busy": lambda: told(
        "A100-80GB:1",
        busy("box1", "a100-80"),
        busy("box2", "a100-80", "a100-80", tasks=(BATCH, TRAIN)),
        view("lab", "4090"),
        depth=5,
        place=3,
    ),
    "only-capable-busy": lambda: told("A100-80GB:1", busy("box2", "a100-80"), view("box1", "a100-40")),
    "drained": lambda: told("A100:1", busy("box1", "a100-80", state="DRAINING"), view("lab", "4090")),
    "disabled": lambda: told("A100:1", view("box1", "a100-80", enabled=False)),
    "reserved-for-a-bigger-task": lambda: told(
        "A100:1",
        view(
            "box1",
            "a100-80",
            "a100-80",
            "a100-80",
            "a100-80",
            reservation=Reservation(
                task="9c1d", name="train-70b", gpus=("GPU-0", "GPU-1", "GPU-2", "GPU-3"), seconds=190
            ),
        ),
    ),
    "foreign-process": lambda: told("A100:1", view("box1", "a100-80", foreign_mib={"GPU-0": 30 * 1024})),
    "no-executor": lambda: told(
        "A100:1",
        view("box1", "a100-80", executors=("inference", "echo")),
        task=replace(TASK, name="serve", executor="vllm"),
    ),
    "no-environment": lambda: told(
        "cpu",
        view("box1", offers=NO_VLLM),
        view("box2", "a100-80", offers=NO_VLLM, gpu_offers=Offers(names=frozenset({"inference:vllm"}))),
        task=replace(TASK, name="ask", executor="inference:vllm"),
    ),
    "no-environment-for-gpus": lambda: told(
        "A100:1",
        view("box1", "a100-80", offers=Offers(names=frozenset({"inference:vllm"})), gpu_offers=NO_VLLM),
        task=replace(TASK, name="ask", executor="inference:vllm"),
    ),
    "restricted-by-q": lambda: told(
        "A100:1", view("box1", "a100-80", families=("gpu-h100", "cpu")), view("box2", "a100-80", families=())
    ),
    "gone": lambda: told(
        "A100:1", view("box1", "a100-80", state="OFFLINE", silent_seconds=4000), view("old", "t4", state="OFFLINE")
    ),
    "stopped": lambda: told("A100:1", view("box1", "a100-80", state="OFFLINE", stopped=True, silent_seconds=4000)),
    "stopped-beside-a-busy-one": lambda: told(
        "A100:1",
        busy("box1", "a100-80"),
        view("box2", "a100-80", state="OFFLINE", stopped=True),
        view("box3", "a100-80", state="OFFLINE", silent_seconds=90),
    ),
    "full-disk-beside-a-stopped-one": lambda: told(
        "A100:1",
        view("box1", "a100-80", state="OFFLINE", stopped=True, silent_seconds=4000),
        with_disk(view("box2", "a100-80"), free_mib=800, floor_mib=1024),
        view("lab", "4090"),
    ),
    "lost-gpu-beside-a-stopped-one": lambda: told(
        "A100:1",
        view("box1", "a100-80", state="OFFLINE", stopped=True, silent_seconds=4000),
        view("box2", gpu_problems=("GPU-1: the GPU is lost (it fell off the bus); reset it or reboot the machine",)),
        view("lab", "4090"),
    ),
    "after-a-failure": lambda: told(
        "A100:1",
        view("box1", "a100-80"),
        busy("box2", "a100-80"),
        task=replace(TASK, attempt=1, avoids="box1", avoid_seconds=25.4),
    ),
    "next-attempt-later": lambda: told(
        "A100:1",
        view("box1", "a100-80"),
        task=replace(TASK, attempt=1, wait_seconds=41.0),
        depth=0,
        place=None,
        oldest=None,
    ),
    "no-worker": lambda: told("A100:1"),
    "free-but-others-come-first": lambda: told("A100:1", view("box1", "a100-80"), depth=7, place=4),
    "starts-now": lambda: told("cpu", view("box1", state="BUSY", free_jobs=3, tasks=(TRAIN,)), view("box2")),
    "share-and-compute-capability": lambda: told(
        {"hardware": {"gpu": {"shared": True, "memory": "20GB", "compute_capability": "8.9"}, "disk": "500Gi"}},
        view("attic", "t4"),
        view("box1", "a100-40"),
    ),
    "runs": lambda: told(
        "A100:1",
        busy("box1", "a100-80", tasks=(RunningTask(id="4f1c", name="tune", seconds=8000),)),
        task=replace(TASK, state="RUNNING", attempt=2, worker="box1", running_seconds=8000),
        depth=0,
        place=None,
        oldest=None,
    ),
    "not-submitted": lambda: told(
        "A100:1", busy("box1", "a100-80"), task=TaskView(name="tune", executor="lora_sft"), depth=2, place=None
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_text_of_a_situation(name):
    assert SITUATIONS[name]().to_lines() == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def test_every_text_belongs_to_a_situation():
    assert {path.stem for path in GOLDEN.iterdir()} == set(SITUATIONS)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("too-little-vram", "cannot"),
        ("all-busy", "waits"),
        ("reserved-for-a-bigger-task", "waits"),
        ("foreign-process", "waits"),
        ("restricted-by-q", "cannot"),
        ("gone", "cannot"),
        ("starts-now", "starts"),
        ("runs", "runs"),
    ],
)
def test_the_outcome_for_programs(name, outcome):
    assert SITUATIONS[name]().outcome == outcome


def test_the_json_has_the_documented_fields():
    found = json.loads(json.dumps(SITUATIONS["all-busy"]().to_dict()))

    assert found["schema"] == 1
    assert {key: found[key] for key in ("id", "name", "state", "queue", "depth", "place", "oldestSeconds")} == {
        "id": "4f1c",
        "name": "tune",
        "state": "QUEUED",
        "queue": "gpu-a100-80g",
        "depth": 5,
        "place": 3,
        "oldestSeconds": 130,
    }
    assert found["resources"] == {"accelerators": "a100:80GB+:1"}
    assert Requirement.from_dict(found["requirement"]).queue_name() == found["queue"]
    box1, _, lab = found["workers"]
    assert (box1["id"], box1["fits"], box1["situation"]) == ("box1", True, "busy")
    assert box1["tasks"] == [{"id": "7aa1", "name": "train-7b", "runningSeconds": 730}]
    assert box1["reasons"] == ["is busy with train-7b (7aa1), started 12 min ago"]
    assert (lab["fits"], lab["situation"]) == (False, "unfit")
    assert lab["failing"] == [
        {
            "kind": "gpu_name",
            "asked": "a100",
            "has": "1x rtx4090",
            "message": "asks for a100, the worker has 1x rtx4090",
        }
    ]


def test_the_nearest_miss_comes_first():
    workers = [
        view("no-gpu"),
        view("other-type", "h100"),
        view("half-the-memory", "a100-40"),
        view("right-but-label", "a100-80"),
        view("two-misses", "t4", labels={"team": "vision"}),
    ]
    found = told({"accelerators": "A100-80GB", "labels": {"team": "nlp"}}, *workers)
    assert [one.worker for one in found.others] == [
        "right-but-label",
        "half-the-memory",
        "other-type",
        "two-misses",
        "no-gpu",
    ]


def test_only_a_reservation_of_the_gpus_for_another_task_keeps_a_task_away():
    own = told("A100:1", view("box1", "a100-80", reservation=Reservation(task="4f1c", gpus=("GPU-0",))))
    other_gpu = told("A100:1", view("box1", "a100-80", "a100-80", reservation=Reservation(task="x", gpus=("GPU-0",))))
    on_cpu = told("cpu", view("box1", "a100-80", reservation=Reservation(task="x")))
    assert [found.workers[0].kind for found in (own, other_gpu, on_cpu)] == ["free"] * 3


@pytest.mark.parametrize(("room", "kind"), [(12_000, "free"), (11_000, "busy"), (None, "busy")])
def test_a_share_is_taken_from_a_busy_gpu_if_that_has_room(room, kind):
    worker = busy("box1", "l4", room_mib=None if room is None else {"GPU-0": room})
    assert told("L4:0.5", worker).workers[0].kind == kind


@pytest.mark.parametrize(
    ("resources", "usage", "text"),
    [
        (
            {"cpu": 2},
            HostUsage(cpus=15),
            "is busy with train-7b (7aa1), started 12 min ago; 15 of its 16 CPUs are in use",
        ),
        ({"cpu": 2}, HostUsage(cpus=14), "has room"),
        ("cpu", HostUsage(undeclared_jobs=1, undeclared_limit=2), "has room"),
        (
            "cpu",
            HostUsage(undeclared_jobs=2, undeclared_limit=2),
            "is busy with train-7b (7aa1), started 12 min ago; "
            "it runs as many tasks without declared CPUs as it may at once (2)",
        ),
        (
            {"memory": "48 GiB"},
            HostUsage(memory_mib=24 * 1024),
            "is busy with train-7b (7aa1), started 12 min ago; 24 GiB of its 64 GiB of memory are in use",
        ),
    ],
)
def test_a_busy_worker_takes_what_its_host_has_left(resources, usage, text):
    asked = resources if isinstance(resources, str) else {"hardware": {"gpu": {"count": 0}, **resources}}
    worker = busy("box1", "a100-80", usage=usage)
    assert told(asked, worker).workers[0].text == text


@pytest.mark.parametrize(
    ("limit", "left", "ahead", "kind"),
    [
        (60.0, 90.0, False, "free"),
        (600.0, 90.0, False, "reserved"),
        (None, 90.0, False, "reserved"),
        (60.0, None, False, "reserved"),
        (None, None, True, "free"),
    ],
)
def test_what_ends_in_time_or_goes_before_may_use_reserved_gpus(limit, left, ahead, kind):
    reserved = Reservation(task="x", queue="gpu-2", gpus=("GPU-0",), seconds_left=left)
    task = replace(TASK, limit_seconds=limit, ahead_of=frozenset({"gpu-2"} if ahead else ()))
    assert told("A100:1", view("box1", "a100-80", reservation=reserved), task=task).workers[0].kind == kind


def test_what_a_foreign_process_leaves_of_a_gpu_is_there_for_a_task_that_says_what_it_needs():
    worker = view("box1", "a100-80", foreign_mib={"GPU-0": 30 * 1024})
    assert [told(ask, worker).workers[0].kind for ask in ("A100:1", "40GB:1", "60GB:1")] == [
        "foreign",
        "free",
        "foreign",
    ]


def test_what_a_worker_does_not_tell_is_unknown_and_not_against_it():
    found = told("A100:1", WorkerView(id="old", capability=machine("a100-80")))
    assert found.verdict == "can start now: old is free"


def test_a_large_fleet_is_counted_not_listed():
    found = told("H100:1", *(view(f"box{n:03}", "t4") for n in range(200)))
    lines = found.to_lines()
    assert len(lines) <= MAX_LISTED + 6
    assert lines[-1] == f"    and {200 - MAX_LISTED} more"
    assert len(found.to_dict()["workers"]) == 200


STATES = ["CONNECTING", "IDLE", "BUSY", "DRAINING", "OFFLINE"]
CARDS = ["a100-40", "a100-80", "t4", "l4", "mig", "h100"]


@st.composite
def worker_views(draw):
    uuids = st.lists(st.sampled_from([f"GPU-{n}" for n in range(4)]), max_size=4, unique=True).map(tuple)
    return view(
        draw(st.sampled_from(["a", "b", "c"])),
        *draw(st.lists(st.sampled_from(CARDS), max_size=4)),
        state=draw(st.sampled_from(STATES)),
        enabled=draw(st.booleans()),
        silent_seconds=draw(st.none() | st.floats(0, 1e6)),
        families=draw(st.none() | st.just(()) | st.just(("gpu-a100", "cpu"))),
        executors=draw(st.none() | st.just(("echo",))),
        free_gpus=draw(st.none() | uuids),
        free_jobs=draw(st.none() | st.integers(0, 4)),
        tasks=draw(st.just(()) | st.just((TRAIN,)) | st.just((RunningTask(id="x"),) * 5)),
        reservation=draw(st.none() | st.builds(Reservation, task=st.sampled_from(["4f1c", "x"]), gpus=uuids)),
        foreign_mib=dict.fromkeys(draw(uuids), 4000),
    )


@st.composite
def task_views(draw):
    return TaskView(
        id="4f1c",
        name="tune",
        state=draw(st.none() | st.sampled_from(["PENDING", "QUEUED", "MERGED", "STARTING", "RUNNING", "FAILED"])),
        executor="echo",
        wait_seconds=draw(st.none() | st.floats(-5, 100)),
        avoids=draw(st.none() | st.just("a")),
        avoid_seconds=draw(st.none() | st.floats(-5, 100)),
    )


@given(requirements(), task_views(), st.lists(worker_views(), max_size=4))
def test_every_situation_has_an_answer(requirement, task, workers):
    queue = QueueView(name=requirement.queue_name(), depth=1, place=1)
    found = explain(requirement, task, queue, workers)
    assert found.verdict
    assert json.loads(json.dumps(found.to_dict()))["outcome"] == found.outcome
    assert all("\n" not in line for line in found.to_lines())


def test_what_holds_a_task_is_told_of_workers_that_are_there():
    ask = {"hardware": {"memory": "1 GB", "gpu": {"count": 0}}}
    limits = {"limits": ("cgroup", "")}
    lines = told(ask, view("w1", **limits), view("gone", state="OFFLINE", **limits)).to_lines()
    assert [line.strip() for line in lines if "limits:" in line] == ["limits:   enforced by cgroup on w1"]
