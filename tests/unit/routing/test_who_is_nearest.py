"""The worker that is nearest to running a task says why it does not run; those that have stopped come after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_explanations import TASK, busy, told, view, with_disk

from gpuflow.routing.explain import Explanation
from gpuflow.routing.offers import Offers
from gpuflow.routing.situation import _DISTANCES, IN_WORDS, ORDER, PASSING, Distance, Kind
from gpuflow.routing.views import WorkerView

COMMAND = replace(TASK, executor="command")


def full(name: str, *cards: str, **fields: Any) -> WorkerView:
    return with_disk(view(name, *cards, **fields), free_mib=800, floor_mib=1024)


def stopped(name: str, *cards: str, **fields: Any) -> WorkerView:
    return view(name, *cards, **{"state": "OFFLINE", "stopped": True, "silent_seconds": 40, **fields})


#: What keeps a worker that is there, and how its text begins.
HINDRANCES: dict[str, tuple[WorkerView, str]] = {
    "disabled": (view("there", "a100-80", enabled=False), "is disabled"),
    "disk_full": (full("there", "a100-80"), "has 800 MiB of disk free, less than its floor of 1024 MiB; make room"),
    "restricted": (view("there", "a100-80", families=("cpu",)), "does not serve gpu-a100: its -Q is cpu; start one"),
    "no_executor": (view("there", "a100-80", offers=Offers()), "has no executor command: "),
    "not_allowed": (view("there", "a100-80", allows_code=()), "allows tasks no command"),
    "outdated": (view("there", "a100-80", record_schema=1), "has an older gpuflow than the sender"),
    "gpu_problem": (
        view("there", gpu_problems=("no NVIDIA driver on this machine",)),
        "cannot run it: the task asks for 1 GPU, the worker has none: no NVIDIA driver on this machine; or start",
    ),
    "draining": (view("there", "a100-80", state="DRAINING"), "is draining: "),
    "silent": (view("there", "a100-80", state="SILENT", silent_seconds=50), "is silent: it was last heard of"),
}


def of(kind: str, *others: WorkerView) -> Explanation:
    task = replace(COMMAND, record_schema=2) if kind == "outdated" else COMMAND
    return told("A100:1", *others, HINDRANCES[kind][0], task=task)


def test_each_kind_has_a_distance_and_they_are_told_in_its_order() -> None:
    assert set(ORDER) == set(Kind.__args__) == set(_DISTANCES)  # type: ignore[attr-defined]
    distances = [_DISTANCES[kind] for kind in ORDER]
    assert distances == sorted(distances)
    assert {kind for kind in ORDER if _DISTANCES[kind] < Distance.HINDERED} == PASSING
    assert {*HINDRANCES} == {kind for kind in ORDER if _DISTANCES[kind] is Distance.HINDERED}
    assert set(IN_WORDS) >= set(ORDER) - {"free", "gpu_problem", "unfit"}


@pytest.mark.parametrize("kind", HINDRANCES)
def test_what_keeps_a_worker_that_is_there_comes_before_one_that_has_stopped(kind: str) -> None:
    found = of(kind, stopped("before", "a100-80"))

    assert [one.worker for one in found.workers] == ["there", "before"]
    assert found.workers[0].kind == kind
    assert found.verdict.startswith(f"cannot start: the only {'worker' if kind == 'gpu_problem' else 'capable worker'} "
                                    f"left, there, {HINDRANCES[kind][1]}")  # fmt: skip
    assert found.verdict.endswith(" before, which has stopped")
    lines = "\n".join(found.to_lines())
    assert lines.index("    there ") < lines.index("    before ")


@pytest.mark.parametrize("kind", HINDRANCES)
def test_without_one_that_has_stopped_nothing_is_said_of_any(kind: str) -> None:
    assert "stopped" not in "\n".join(of(kind).to_lines()) and " left," not in of(kind).verdict


@pytest.mark.parametrize("kind", HINDRANCES)
def test_what_ends_by_itself_comes_before_all(kind: str) -> None:
    found = of(kind, busy("works", "a100-80", record_schema=9))
    assert found.outcome == "waits" and found.workers[0].worker == "works"


def test_where_a_machine_could_never_run_it_one_that_has_stopped_is_the_cause() -> None:
    found = told("A100:1", view("small", "t4"), stopped("big", "a100-80"))
    assert found.verdict == (
        "cannot start: the only capable worker big has stopped: it was last heard of 40 s ago; start it again "
        "(of those that are there small is the nearest, but the task asks for a100, the worker has 1x t4)"
    )
    assert [one.worker for one in found.workers] == ["big", "small"]


def test_of_the_names_that_a_container_had_the_last_is_told() -> None:
    former = [stopped(f"w-{number}", "t4", stopped=False, silent_seconds=9000 - number) for number in range(3)]
    found = told("T4:1", *former)
    assert [one.worker for one in found.workers] == ["w-2", "w-1", "w-0"]
    assert "all 3 capable workers are gone; w-2 is gone: it was last heard of 2 h 29 min ago; start" in found.verdict


@pytest.mark.parametrize(
    "useless",
    [
        stopped("before", "t4"),
        stopped("before", "a100-80", allows_code=()),
        stopped("before", "a100-80", families=("cpu",)),
        stopped("before", "a100-80", offers=Offers()),
        stopped("before", "a100-80", state="OFFLINE", stopped=False, record_schema=0),
        full("before", "a100-80", state="OFFLINE", stopped=True),
    ],
)
def test_one_that_would_not_take_it_is_not_told(useless: WorkerView) -> None:
    closed = told("A100:1", view("there", "a100-80", allows_code=()), useless, task=COMMAND)
    assert [one.worker for one in closed.workers] == ["there"]
    assert closed.verdict.startswith("cannot start: the only capable worker there allows tasks no command")
    assert told("A100:1", useless, task=COMMAND).verdict.startswith("cannot start: no worker is there; start one")


def test_what_is_not_allowed_is_not_missing_as_well() -> None:
    offers = Offers(names=frozenset({"echo"}))
    found = told("A100:1", view("w6", "a100-80", allows_code=(), offers=offers, gpu_offers=offers), task=COMMAND)
    assert found.workers[0].kind == "not_allowed"
    assert "it is also" not in found.workers[0].text


def test_a_worker_that_was_disabled_before_it_stopped_says_both() -> None:
    found = told("A100:1", stopped("w1", "a100-80", enabled=False))
    assert found.workers[0].text == "has stopped: it was last heard of 40 s ago; it is also disabled"


def test_all_that_keeps_a_worker_is_told_and_one_thing_alone_is_nearer() -> None:
    two = full("a", "a100-80", enabled=False, families=("cpu",))
    one = view("b", "a100-80", state="SILENT", silent_seconds=50)
    found = told("A100:1", two, one)
    assert [one.worker for one in found.workers] == ["b", "a"]
    assert found.workers[1].text == (
        "is disabled: it takes nothing until it is enabled again; it is also short of disk and kept away by -Q"
    )
    assert told("A100:1", two).verdict.endswith("; start another one")
    assert told("A100:1", two, stopped("c", "a100-80")).verdict.endswith(
        "; start another one, such as c, which has stopped"
    )


def test_several_are_counted_and_those_that_have_gone_after_them() -> None:
    there = [view("a", "a100-80", enabled=False), full("b", "a100-80"), full("c", "a100-80")]
    gone = [stopped("x", "a100-80"), stopped("y", "a100-80", stopped=False)]
    assert told("A100:1", *gone, *there).verdict == (
        "cannot start: 3 workers can run it, none of them now: 1 disabled, 2 short of disk; "
        "start another one, such as x, one of 2 that have gone"
    )
    assert told("A100:1", *gone, *there[1:]).verdict == (
        "cannot start: both capable workers left are short of disk; b has 800 MiB of disk free, less than its floor of "
        "1024 MiB; make room there; or start x, one of 2 that have gone"
    )
    assert told("A100:1", *gone).verdict.startswith(
        "cannot start: both capable workers are gone or have stopped; x has stopped"
    )
    silent = [replace(one, stopped=False) for one in gone]
    assert told("A100:1", *silent).verdict.startswith("cannot start: both capable workers are gone; x is gone")
    assert told("A100:1", *gone[:1], stopped("z", "a100-80")).verdict.startswith(
        "cannot start: both capable workers have stopped; x has stopped"
    )


def test_a_full_disk_counts_only_where_the_machine_has_what_is_asked_for() -> None:
    asks_disk = {"hardware": {"disk": "500Gi", "gpu": {"count": 0}}}
    assert [told(ask, full("w1", "a100-80")).workers[0].kind for ask in ("A100:1", "H100:1", asks_disk)] == [
        "disk_full",
        "unfit",
        "unfit",
    ]


@pytest.mark.parametrize(
    ("ask", "cards", "kind"),
    [
        ("A100:2", ("a100-80",), "gpu_problem"),
        ("A100:1", ("a100-80",), "free"),
        ("H100:1", ("a100-80",), "unfit"),
        ({"accelerators": "A100:1", "labels": {"site": "b"}}, (), "unfit"),
        ("cpu", (), "free"),
    ],
)
def test_a_gpu_that_cannot_be_used_counts_where_gpus_are_all_that_is_missing(
    ask: Any, cards: tuple[str, ...], kind: str
) -> None:
    worker = view("w1", *cards, gpu_problems=("GPU-1: the GPU is lost",))
    assert told(ask, worker).workers[0].kind == kind
