"""Simulated machines that share one fleet: a task that asks for a box runs on the workers of that box alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuflow.client import Task, submit
from gpuflow.explaining import explain
from gpuflow.routing.explain import Explanation
from tests.fixtures.simulated_nvml import SimGpu, simulated_machine, write_machine
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually

#: A task that waits to be cancelled.
FOR_EVER = 600


class Box:
    """One simulated machine of a fleet, with a lock directory of its own and workers labelled `box=<name>`.

    A context manager: what runs and waits on it, and its workers, end with the block.
    """

    def __init__(self, fleet: TestFleet, name: str, machine: str | Sequence[SimGpu] = "", label: str = "") -> None:
        self.fleet = fleet
        self.name = name
        self.label = label or name
        self.folder: Path = fleet.folder / f"box-{name}"
        self.folder.mkdir()
        self.env = {
            **(simulated_machine(self.folder, machine) if machine else {}),
            "GPUFLOW_LOCK_DIR": str(self.folder / "locks"),
        }
        self.workers: list[WorkerProcess] = []
        self.tasks: list[Task] = []

    def become(self, machine: str | Sequence[SimGpu]) -> None:
        """Change the machine under its workers."""
        write_machine(self.folder / "nvml.state", machine)

    def spawn(self, name: str, *options: str, **env: str) -> WorkerProcess:
        """Start a worker of this machine without waiting for it."""
        worker = self.fleet.spawn_worker(name, "--label", f"box={self.label}", *options, env={**self.env, **env})
        self.workers.append(worker)
        return worker

    def start(self, name: str, *options: str, **env: str) -> WorkerProcess:
        """Start a worker of this machine."""
        return self.spawn(name, *options, **env).ready()

    def submit(self, accelerators: Any = None, *, more: dict[str, Any] | None = None, **fields: Any) -> Task:
        """Submit an echo task for this box; `more` goes into its resources, `fields` into its spec."""
        resources = {**({"accelerators": accelerators} if accelerators else {}), **(more or {})}
        echo = {"report_env": ["CUDA_VISIBLE_DEVICES"], **fields.pop("echo", {})}
        spec = {"taskType": "echo", "echo": echo, **fields, "resources": {**resources, "labels": {"box": self.label}}}
        if spec["taskType"] != "echo":
            del spec["echo"]
        task = submit(spec, app=self.fleet.app)
        self.tasks.append(task)
        return task

    def hold(self, accelerators: Any = None, **options: Any) -> Task:
        """Submit a task that holds what it asks for until it is cancelled."""
        return self.submit(accelerators, echo={"sleep_seconds": FOR_EVER}, **options)

    def held(self, accelerators: Any = None, **options: Any) -> Task:
        """Submit such a task, and wait until it runs."""
        return running(self.hold(accelerators, **options))

    def explained(self, task: Task) -> Explanation:
        (one,) = explain(task.id, app=self.fleet.app)
        return one

    def kinds(self, task: Task) -> dict[str, str]:
        """Return how each worker of this box stands to a task."""
        names = {worker.name for worker in self.workers}
        return {one.worker: one.kind for one in self.explained(task).workers if one.worker in names}

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self.tasks:
            if not task.record().state.final:
                task.cancel()
        for worker in self.workers:
            worker.close()


def running(task: Task) -> Task:
    """Wait until a task runs."""
    eventually(lambda: task.state == "RUNNING", what=f"{task.id} runs")
    return task


def waits(*tasks: Task) -> bool:
    """Whether all of these tasks are still in their queues."""
    return all(task.state == "QUEUED" for task in tasks)
