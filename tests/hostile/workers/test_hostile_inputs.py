"""What a task reads is hostile: its task fails with the cause, and the worker goes on with its other work."""

from __future__ import annotations

import contextlib
import gzip
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuflow.client import Task, submit
from gpuflow.errors import TaskFailed
from tests.support.fleet import TestFleet, WorkerProcess, gone
from tests.support.hostile_archives import endless_number
from tests.support.hostile_peer import HostilePeer
from tests.support.waiting import eventually, patient

ENV = {"GPUFLOW_LEASE_SEC": "3", "GPUFLOW_DOWNLOAD_MAX_BYTES": "8MB"}


class Beside:
    """A task that runs on the worker all the time."""

    def __init__(self, fleet: TestFleet, folder: Path) -> None:
        self._gate = folder / "may-end"
        self.task = submit(fleet.echo(output="beside", until_exists=str(self._gate)), app=fleet.app)
        eventually(lambda: self.task.state == "RUNNING", what="the task beside")

    def ends_well(self) -> None:
        """It has never been disturbed: one attempt, no loss."""
        self._gate.touch()
        assert self.task.get(timeout=patient(30))["output"] == "beside"
        record = self.task.record()
        assert (record.attempt, record.losses) == (1, 0)


@pytest.fixture
def worker(fleet: TestFleet) -> WorkerProcess:
    return fleet.start_worker("w1", "--max-jobs", "2", env=ENV)


@pytest.fixture
def beside(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> Iterator[Beside]:
    made = Beside(fleet, tmp_path)
    yield made
    made.ends_well()


def reading(fleet: TestFleet, address: str, **more: object) -> Task:
    load = {"url": address}
    spec = {"taskType": "echo", "echo": {"output": 1}, "checkpoint": {"load": load}, "retry": {"max_attempts": 1}}
    return submit({**spec, **more}, app=fleet.app)


@pytest.mark.parametrize(("digits", "cause"), [(180_000, "too large"), (60_000, "endless number")])
def test_an_archive_whose_header_holds_tarfile(
    fleet: TestFleet, beside: Beside, tmp_path: Path, digits: int, cause: str
) -> None:
    archive = tmp_path / "adapter.tar.gz"
    archive.write_bytes(gzip.compress(endless_number(digits)))

    with pytest.raises(TaskFailed, match=cause):
        reading(fleet, archive.as_uri()).get(timeout=patient(60))


def memory_bytes(worker: WorkerProcess) -> int:
    """Return the most memory that a process ever had."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) << 10


def readers(worker: WorkerProcess) -> list[int]:
    found = []
    for process in worker.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "gpuflow.artifacts.reader_child" in process.cmdline():
                found.append(process.pid)
    return found


def test_a_hostile_server(fleet: TestFleet, worker: WorkerProcess, beside: Beside) -> None:
    with HostilePeer() as peer:
        with pytest.raises(TaskFailed):
            reading(fleet, f"{peer.url}/large").get(timeout=patient(60))
        before = memory_bytes(worker)

        with pytest.raises(TaskFailed, match="GPUFLOW_DOWNLOAD_MAX_BYTES"):
            reading(fleet, f"{peer.url}/endless").get(timeout=patient(60))
        with pytest.raises(TaskFailed, match="redirects"):
            reading(fleet, f"{peer.url}/loop").get(timeout=patient(60))
        for path in ("drip", "drip-header"):
            task = reading(fleet, f"{peer.url}/{path}", timeout="1s")
            with pytest.raises(TaskFailed, match="the limit is 1 s"):
                task.get(timeout=patient(60))
        cancelled = reading(fleet, f"{peer.url}/drip-header/2")
        eventually(lambda: "/drip-header/2" in peer.asked, what="the request")
        cancelled.cancel()
        eventually(lambda: cancelled.state == "CANCELLED", what="the cancel")

        eventually(lambda: not readers(worker), what="the end of all that reads")
        assert memory_bytes(worker) - before < 50_000_000


def test_a_drain_does_not_wait_for_a_hostile_server(fleet: TestFleet, worker: WorkerProcess) -> None:
    with HostilePeer() as peer:
        reading(fleet, f"{peer.url}/drip")
        eventually(lambda: readers(worker) and peer.asked, what="the request")
        left = readers(worker)

        worker.send(signal.SIGQUIT)

        worker.process.wait(timeout=patient(30))
        gone(left)


def test_what_reads_ends_with_a_worker_that_is_killed(fleet: TestFleet, worker: WorkerProcess) -> None:
    with HostilePeer() as peer:
        reading(fleet, f"{peer.url}/drip")
        eventually(lambda: readers(worker) and peer.asked, what="the request")
        left = readers(worker)

        worker.process.kill()

        worker.process.wait(timeout=patient(30))
        gone(left)
