"""A GPU that falls off the bus, and a worker that is killed: what happens to the tasks and to the GPUs."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from gpuflow.fleet.standing import standings
from gpuflow.ledger.records import AttemptEntry
from tests.fixtures.simulated_nvml import SimGpu, gpu_uuid
from tests.support.boxes import FOR_EVER, Box, running, waits
from tests.support.fleet import TestFleet
from tests.support.fleet import running as alive
from tests.support.waiting import eventually, patient

LEASE_SECONDS = 3


@pytest.fixture
def gpus(tmp_path: Path) -> TestFleet:
    """A fleet with short leases."""
    made = TestFleet(tmp_path, env={"GPUFLOW_LEASE_SEC": str(LEASE_SECONDS)}, options=("--without-mingle",))
    try:
        yield made
    finally:
        made.close()


def offered(box: Box, worker: str) -> list[str]:
    """Return the GPUs that a worker says it has."""
    entry = box.fleet.registry.find(worker)
    return [gpu["uuid"] for gpu in entry.capability["gpus"]] if entry else []


def problems(box: Box, worker: str) -> str:
    """Return what every view tells of the GPUs of a worker; "" when all is well."""
    entry = box.fleet.registry.find(worker)
    return "; ".join(one.text for one in standings(entry) if one.kind == "gpu-problem") if entry else ""


def attempts(box: Box, task_id: str) -> list[AttemptEntry]:
    return box.fleet.app.ledger.attempts(task_id)


def shims(worker: psutil.Process) -> list[psutil.Process]:
    """Return the shims of a worker: the processes between the one that forks them and the children."""
    found = []
    for process in worker.children(recursive=True):
        parent = process.parent()
        if parent is not None and any(word.endswith("shim.py") for word in parent.cmdline()):
            found += [process] if any(word.endswith("shim.py") for word in process.cmdline()) else []
    return found


def open_files(pid: int) -> set[Path]:
    """Return what the file descriptors of a process point to."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(entry.readlink())
    return found


def test_a_task_whose_gpu_is_lost_goes_on_elsewhere_and_the_worker_stays(gpus: TestFleet) -> None:
    with Box(gpus, "bus", "2xA100-80GB") as box:
        worker = box.start("bus")
        both = [
            running(box.submit("A100:1", echo={"sleep_seconds": FOR_EVER}, retry={"backoff_seconds": 0}))
            for _ in range(2)
        ]

        box.become([SimGpu(lost=True), SimGpu()])

        (stopped,) = eventually(lambda: [task for task in both if attempts(box, task.id)], what="the end of an attempt")
        eventually(lambda: offered(box, "bus") == [gpu_uuid(1)], what="the lost GPU is taken out")
        told = eventually(lambda: problems(box, "bus"), what="what is wrong with its GPUs is told")
        assert gpu_uuid(0) in told and "fell off the bus" in told
        (other,) = [task for task in both if task is not stopped]
        (first,) = attempts(box, stopped.id)
        assert first.error is not None
        assert (first.error["type"], first.error["retryable"]) == ("GpuLost", True)
        assert waits(stopped)
        assert other.state == "RUNNING"
        assert not attempts(box, other.id)

        other.cancel()
        running(stopped)
        assert stopped.record().attempt == 2
        late = box.hold("A100:1")
        box.become("2xA100-80GB")
        running(late)
        eventually(lambda: offered(box, "bus") == [gpu_uuid(0), gpu_uuid(1)], what="the GPU is offered again")
        eventually(lambda: not problems(box, "bus"), what="all is well again")
        assert worker.process.poll() is None
        assert stopped.record().attempt == 2, "the task on the other GPU was left alone"


def test_a_task_goes_to_another_machine_when_its_worker_has_no_gpu_left(gpus: TestFleet) -> None:
    with Box(gpus, "first", "1xA100-80GB", label="pair") as first, Box(gpus, "second", "1xL4", label="pair") as second:
        one, two = first.spawn("first"), second.spawn("second", "-Q", "gpu")
        one.ready(), two.ready()
        task = running(first.submit("A100:1", echo={"sleep_seconds": FOR_EVER}, retry={"backoff_seconds": 0}))

        first.become([SimGpu(lost=True)])
        eventually(lambda: waits(task), what="the task is given back")
        eventually(lambda: first.kinds(task) == {"first": "gpu_problem"}, what="explain names its GPU")

        second.become("1xA100-80GB")  # what a worker has is found out at its start
        third = second.start("third")
        running(task)
        assert (task.record().worker, task.record().attempt) == ("third", 2)
        assert one.process.poll() is None
        assert third.process.poll() is None


def test_the_gpu_of_a_killed_worker_is_free_when_nothing_of_its_task_is_left(gpus: TestFleet) -> None:
    with Box(gpus, "killed", "1xA100-80GB") as box:
        first = box.start("first")
        task = running(box.submit("A100:1", echo={"sleep_seconds": FOR_EVER, "children": 2}))
        (shim,) = eventually(lambda: shims(psutil.Process(first.pid)), what="the shim")
        eventually(lambda: len(shim.children(recursive=True)) >= 3, what="the child and its own two")
        tree = [shim.pid, *(process.pid for process in shim.children(recursive=True))]
        assert f"gpu-{gpu_uuid(0)}.lock" in {path.name for path in open_files(shim.pid)}
        for pid in tree[1:]:
            assert not any("locks" in path.parts for path in open_files(pid)), "the child itself holds no lock"
        second = box.start("second")
        next_one = box.submit("A100:1", priority=9)

        shim.send_signal(signal.SIGSTOP)
        first.process.kill()
        first.process.wait()
        assert box.submit(more={"hardware": {"cpu": 0.01}}).wait(timeout=patient(30)).worker == "second"
        assert waits(next_one), "the GPU is held by the shim"
        assert box.kinds(next_one)["second"] == "busy"
        shim.send_signal(signal.SIGCONT)

        record = next_one.wait(timeout=patient(30))
        assert (record.state, record.worker) == ("SUCCEEDED", "second")
        assert alive(tree) == []
        eventually(lambda: (task.record().worker, task.record().attempt) == ("second", 2), what="the task goes on")
        assert second.process.poll() is None
