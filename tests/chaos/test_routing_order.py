"""Order over several queues: by priority, then by when a task was submitted, also for one whose worker was killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from gpuflow.client import Task, submit
from tests.chaos.conftest import LEASE
from tests.fixtures.simulated_nvml import simulated_machine
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

#: Asks that one A100 with 80 GB meets, each with a queue of its own.
ASKS = ("A100:1", "any:1", "24GB:1", "A100-80GB:1")


def submit_one(fleet: TestFleet, accelerators: str, priority: int, **echo: Any) -> Task:
    spec = {**fleet.echo(**echo), "resources": {"accelerators": accelerators}, "priority": priority}
    return submit(spec, app=fleet.app)


def by_start(tasks: list[Task]) -> list[str]:
    """Return the ids of the tasks in the order in which their last attempts were started."""
    started = {task.id: task.wait(timeout=patient(60)).started_at for task in tasks}
    return sorted(started, key=lambda task_id: started[task_id] or 0)


def test_priority_and_age_decide_over_all_queues(fleet: TestFleet, tmp_path: Path) -> None:
    machine = simulated_machine(tmp_path, "1xA100-80GB")
    priorities = (5, 0, 9, 5, 3, 9, 5, 0, 7, 5, 9, 3)
    tasks = [submit_one(fleet, ASKS[n % len(ASKS)], priority) for n, priority in enumerate(priorities)]

    fleet.start_worker("w1", env=machine)

    expected = sorted(range(len(tasks)), key=lambda n: (-priorities[n], n))
    assert by_start(tasks) == [tasks[n].id for n in expected]


def test_the_task_of_a_killed_worker_keeps_its_place(fleet: TestFleet, tmp_path: Path) -> None:
    env = {**simulated_machine(tmp_path, "1xA100-80GB"), **LEASE}
    killed = fleet.start_worker("w1", env=env)
    gate = tmp_path / "gate"
    first = submit_one(fleet, "24GB:1", 5, until_exists=str(gate))
    eventually(lambda: first.state == "RUNNING", what="the first task running")
    later = [submit_one(fleet, accelerators, 5) for accelerators in ASKS]
    low, urgent = submit_one(fleet, "any:1", 0), submit_one(fleet, "A100:1", 9)
    killed.send(signal.SIGKILL)
    killed.process.wait(timeout=patient(30))
    gate.touch()

    # Somebody has to sweep: a worker that serves none of these queues.
    fleet.start_worker("sweeper", "-Q", "gpu-h100", env=LEASE)
    eventually(lambda: fleet.broker.client.llen("gpu-24g") == 2, what="the task back in its queue")
    fleet.start_worker("w2", env=env)

    assert by_start([*later, low, urgent, first]) == [urgent.id, first.id, *(task.id for task in later), low.id]
    assert first.record().attempt == 2
