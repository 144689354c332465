"""What a task reads is hostile: its task fails with the cause, and the worker goes on with its other work."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflow.client import Task, submit
from gpuflow.errors import TaskFailed
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.hostile_archives import endless_number
from tests.support.waiting import eventually, patient

ENV = {"GPUFLOW_LEASE_SEC": "3"}


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
