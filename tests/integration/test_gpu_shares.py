"""What a task gets of a machine: shares of a GPU, MIG slices, what foreign processes leave, CPUs, memory and disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.explaining import explain
from gpuflow.worker.machine_gpus import FRESH_SECONDS
from tests.fixtures.simulated_nvml import SimGpu, gpu_uuid, mig_uuid
from tests.support.boxes import Box, running, waits
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

#: Above the largest process id of Linux: a process that gpuflow did not start.
FOREIGN_PID = 2**22 + 1


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """One broker for all tests of this file."""
    made = TestFleet(tmp_path_factory.mktemp("fleet"), options=("--without-mingle",))
    try:
        yield made
    finally:
        made.close()


def part(**gpu: Any) -> dict[str, Any]:
    return {"hardware": {"gpu": gpu}}


def looked_at(box: Box) -> None:
    """Come back when the workers of a box have looked at what is ready, and so passed over what still waits.

    Judged by order: the second task was queued behind all that waits, and is taken by a look that begins after the
    first has ended. What a worker has seen of its GPUs counts for a moment (FRESH_SECONDS), so the first takes longer.
    """
    for seconds in (2 * FRESH_SECONDS, 0):
        light = box.submit(more={"hardware": {"cpu": 0.01}}, echo={"sleep_seconds": seconds})
        assert light.wait(timeout=patient(30)).state == "SUCCEEDED"


# -- shares -----------------------------------------------------------------------------------------------------


def test_two_halves_run_at_once_a_third_and_the_whole_wait(gpus: TestFleet) -> None:
    with Box(gpus, "halves", "1xA100-80GB") as box:
        box.start("halves")
        halves = [box.held(more=part(fraction=0.5)) for _ in range(2)]
        whole = box.hold("A100:1")
        third = box.hold(more=part(fraction=0.5))
        looked_at(box)

        assert waits(whole, third)
        assert box.kinds(third) == box.kinds(whole) == {"halves": "busy"}

        halves[0].cancel()
        eventually(lambda: halves[0].record().state.final)
        looked_at(box)
        assert waits(whole), "half of it is still used"
        halves[1].cancel()
        running(whole)
        looked_at(box)
        assert waits(third), "shares do not run beside a task that has all of it"
        whole.cancel()
        running(third)


def test_explain_calls_no_worker_free_that_is_full_from_the_moment_a_task_runs(gpus: TestFleet) -> None:
    with Box(gpus, "told", "1xA100-80GB") as box:
        box.start("told")
        box.start("beside")  # shares the machine and its GPU
        whole = box.hold("A100:1", priority=0)
        running(whole)
        half, other = (box.hold(more=part(fraction=0.5), priority=0) for _ in range(2))
        assert set(box.kinds(half).values()) == set(box.kinds(other).values()) == {"busy"}

        for _ in range(5):
            whole.cancel()
            running(half)
            running(other)
            whole = box.hold("A100:1", priority=0)
            third = box.hold(more=part(fraction=0.5), priority=0)
            assert set(box.kinds(whole).values()) == set(box.kinds(third).values()) == {"busy"}
            third.cancel()
            half.cancel()
            other.cancel()
            running(whole)
            half, other = (box.hold(more=part(fraction=0.5), priority=0) for _ in range(2))
            assert set(box.kinds(half).values()) == set(box.kinds(other).values()) == {"busy"}

        whole.cancel()
        running(half).cancel()
        running(other).cancel()
        late = box.submit("A100:1")
        assert late.wait(timeout=patient(30)).state == "SUCCEEDED"
        ask = {"taskType": "echo", "resources": {"accelerators": "A100:1", "labels": {"box": "told"}}}

        def free() -> bool:
            (one,) = explain(ask, app=gpus.app)
            return {found.kind for found in one.workers if found.worker in ("told", "beside")} == {"free"}

        eventually(free, what="both are told to be free again")


def test_shares_are_summed_by_memory(gpus: TestFleet) -> None:
    with Box(gpus, "sums", "1xA100-80GB") as box:
        box.start("sums")
        box.held(more=part(fraction=0.5))
        box.held(more=part(memory="30GB", shared=True))
        too_much = box.hold(more=part(memory="12GB", shared=True))
        looked_at(box)
        assert waits(too_much)

        fits = box.held(more=part(memory="8GB", shared=True))

        assert waits(too_much)
        fits.cancel()
        looked_at(box)
        assert waits(too_much)


def test_a_stream_of_shares_does_not_starve_a_task_for_the_whole_gpu(gpus: TestFleet, tmp_path: Path) -> None:
    with Box(gpus, "stream", "1xA100-80GB") as box:
        box.start("stream")
        gates = [tmp_path / str(number) for number in range(2)]
        first = [running(box.submit(more=part(fraction=0.5), echo={"until_exists": str(gate)})) for gate in gates]
        whole = box.submit("A100:1")
        later = [box.submit(more=part(fraction=0.5), echo={"sleep_seconds": 1 + n % 2 / 2}) for n in range(8)]

        gates[0].touch()
        assert first[0].wait(timeout=patient(30)).state == "SUCCEEDED"
        looked_at(box)
        assert waits(whole), "half of it is still used"
        gates[1].touch()

        ran_at = whole.wait(timeout=patient(60)).started_at or 0.0

        before = [task for task in later if (task.record().started_at or ran_at + 1) < ran_at]
        assert len(before) <= 2, "the whole one was queued before them"


# -- MIG --------------------------------------------------------------------------------------------------------


def test_slices_are_devices_and_the_parent_is_none(gpus: TestFleet) -> None:
    with Box(gpus, "mig", [SimGpu(model="A100-80GB", slices=("3g.40gb", "3g.40gb"))]) as box:
        box.start("mig")
        parent = box.hold("A100-80GB:1")
        pair = box.hold("40GB:2")
        slices = [box.held("40GB:1") for _ in range(2)]
        third = box.submit("40GB:1")
        looked_at(box)

        assert waits(third, parent, pair)
        assert box.kinds(parent) == box.kinds(pair) == {"mig": "unfit"}
        slices[1].cancel()
        seen = third.get(timeout=patient(30))
        assert seen["environment"]["CUDA_VISIBLE_DEVICES"] == seen["gpus"][0]
        assert seen["gpus"][0] in {mig_uuid(0, 0), mig_uuid(0, 1)}


# -- foreign processes ------------------------------------------------------------------------------------------


def test_a_foreign_process_keeps_its_gpu_from_those_who_do_not_say_what_they_need(gpus: TestFleet) -> None:
    with Box(gpus, "foreign", [SimGpu(processes=[(FOREIGN_PID, 60_000)])]) as box:
        box.start("foreign")
        unsized = box.submit("A100:1")
        too_big = box.submit("40GB+:1")
        fits = box.submit("16GB+:1")

        assert fits.get(timeout=patient(30))["gpus"] == [gpu_uuid(0)]
        looked_at(box)
        assert waits(unsized, too_big)
        told = {"foreign": "foreign"}
        eventually(lambda: box.kinds(unsized) == box.kinds(too_big) == told, what="the registry tells of the process")
        assert (
            "held by a process outside gpuflow, which uses 58.59 GB of GPU 0 (a100)" in box.explained(unsized).verdict
        )

        box.become("1xA100-80GB")
        assert {task.wait(timeout=patient(30)).state for task in (unsized, too_big)} == {"SUCCEEDED"}
        eventually(lambda: set(box.kinds(unsized).values()) == {"free"}, what="the registry tells that it has gone")

        box.become([SimGpu(processes=[(FOREIGN_PID, 60_000)])])
        looked_at(box)
        share = box.submit(more=part(fraction=0.5))
        small_share = box.submit(more=part(fraction=0.2))
        assert small_share.wait(timeout=patient(30)).state == "SUCCEEDED"
        assert waits(share), "shares are promised of what is left alone"


# -- the host ---------------------------------------------------------------------------------------------------


def test_sums_of_cpus_and_memory_never_exceed_the_machine(gpus: TestFleet) -> None:
    with Box(gpus, "host", "4xL4") as box:
        box.start("host")
        entry = gpus.registry.find("host")
        assert entry is not None
        cpus, mib = int(entry.capability["cpu_count"]), int(entry.capability["memory_mib"])
        most = box.held("L4:1", more={"hardware": {"cpu": cpus - 0.5, "memory": f"{mib * 6 // 10}Mi"}})
        cpu = box.hold("L4:1", more={"hardware": {"cpu": 1}})
        memory = box.hold("L4:1", more={"hardware": {"memory": f"{mib * 6 // 10}Mi"}})
        neither = box.held("L4:1", more={"hardware": {"cpu": 0.5, "memory": f"{mib * 2 // 10}Mi"}})
        looked_at_all(box)

        assert waits(cpu, memory)
        most.cancel()
        running(cpu)
        running(memory)
        neither.cancel()


def looked_at_all(box: Box) -> None:
    """The same for a box whose CPUs are all in use."""
    assert box.submit("L4:1").wait(timeout=patient(30)).state == "SUCCEEDED"


def test_an_ask_for_disk_is_met_by_what_is_free(gpus: TestFleet) -> None:
    with Box(gpus, "disk") as box:
        box.start("disk")
        impossible = box.submit(more={"hardware": {"disk": "900000Gi"}})

        assert box.submit(more={"hardware": {"disk": "1Gi"}}).wait(timeout=patient(30)).state == "SUCCEEDED"

        assert waits(impossible)
        assert box.kinds(impossible) == {"disk": "unfit"}
        assert "of free disk, the worker has" in box.explained(impossible).verdict
