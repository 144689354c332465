"""Two workers on one machine with 4 GPUs, and a mix of tasks for 1, 2 and 4 of them: no GPU twice, nobody starved.

TWO_WORKERS_TASKS and TWO_WORKERS_SECONDS (run time of the longest) choose another mix. Who was passed over is judged by
the broker's own order of events. How well the GPUs were used is printed and not asserted: it depends on how long the
machine takes to start a process.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from gpuflow.client import Task, submit
from tests.chaos.broker_log import BrokerLog
from tests.fixtures.simulated_nvml import gpu_uuid, simulated_machine
from tests.support.fleet import TestFleet
from tests.support.spans import REPORT, Span, double_bookings, span
from tests.support.waiting import patient, promised

pytestmark = pytest.mark.alone

TASKS = int(os.environ.get("TWO_WORKERS_TASKS", "60"))
LONGEST_SECONDS = float(os.environ.get("TWO_WORKERS_SECONDS", "1.5"))
SHORTEST_SECONDS = LONGEST_SECONDS / 3
#: The time limit of each task, which no slow machine reaches. As all have the same, none ends by its limit before those
#: that run already: none may use GPUs that are reserved for a larger one.
LIMIT_SECONDS = 3600
GPUS = 4
#: The sizes, as often as they come.
MIX = (*[1] * 13, *[2] * 6, 4)
SEED = 5


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One task as it was submitted, in the order of submission."""

    number: int
    count: int
    task: Task


def submit_mix(fleet: TestFleet) -> list[Asked]:
    choice = random.Random(SEED)
    asked = []
    for number in range(TASKS):
        count, seconds = choice.choice(MIX), round(choice.uniform(SHORTEST_SECONDS, LONGEST_SECONDS), 2)
        spec = {
            **fleet.echo(sleep_seconds=seconds, report_env=list(REPORT)),
            "resources": {"accelerators": f"A100:{count}"},
            "timeout": LIMIT_SECONDS,
        }
        asked.append(Asked(number=number, count=count, task=submit(spec, app=fleet.app)))
    return asked


def overtaken(of: int, taken: Sequence[int]) -> tuple[int, int]:
    """Return how many tasks that were submitted later were taken before a task, and how many of them when it was next.

    `taken` holds the place of each task in the order in which they were taken, by the order of submission.
    """
    mine, next_at = taken[of], max(taken[:of], default=-1)
    later = [at for at in taken[of + 1 :] if at < mine]
    return len(later), sum(1 for at in later if at > next_at)


def held_seconds(fleet: TestFleet, task_id: str) -> float:
    """Return how long a task had its GPUs as its events say: from its START to the end of its child."""
    events = fleet.app.event_log.read(task_id)
    (start,) = (event.at for event in events if event.name == "state" and event.data["state"] == "STARTING")
    (end,) = (event.at for event in events if event.name == "finish")
    return end - start


def idle_gpu_seconds(spans: list[Span], first: float, last: float) -> dict[str, float]:
    """Return what was not used: in gaps so short that a process was being started, and in longer ones."""
    idle = {"in gaps below 0.5 s": 0.0, "in longer gaps": 0.0}
    for uuid in (gpu_uuid(index) for index in range(GPUS)):
        users = sorted((one for one in spans if uuid in one.gpus), key=lambda one: one.began_at)
        edges = [first, *(at for one in users for at in (one.began_at, one.ended_at)), last]
        for ended, began in list(pairwise(edges))[::2]:
            idle["in gaps below 0.5 s" if began - ended < 0.5 else "in longer gaps"] += began - ended
    return idle


@pytest.mark.timeout(2400)
def test_a_mix_of_sizes_shares_one_machine(fleet: TestFleet, tmp_path: Path) -> None:
    machine = simulated_machine(tmp_path, f"{GPUS}xA100-80GB")
    for name in ("w1", "w2"):
        fleet.spawn_worker(name, "--max-jobs", "3", env=machine)
    for worker in fleet.workers:
        worker.ready()

    with BrokerLog(client=fleet.broker.client) as log:
        asked = submit_mix(fleet)
        records = [one.task.wait(timeout=patient(500)) for one in asked]
        order = [event.task for event in log.events() if event.kind == "take"]

    assert {record.state for record in records} == {"SUCCEEDED"}, [r.error for r in records if r.error]
    spans = [span(record.id, record.result) for record in records]
    assert [len(one.gpus) for one in spans] == [one.count for one in asked]
    promised(not (twice := double_bookings(spans)), f"GPUs were given to two tasks at once: {twice}")
    assert {record.worker for record in records} == {"w1", "w2"}

    first, last = min(one.began_at for one in spans), max(one.ended_at for one in spans)
    used, had = sum(one.gpu_seconds for one in spans), GPUS * (last - first)
    held = sum(len(one.gpus) * held_seconds(fleet, one.name) for one in spans)
    # What went back to its queue counts for the last time that it was taken.
    taken = [len(order) - 1 - order[::-1].index(record.id) for record in records]
    big = [overtaken(one.number, taken) for one in asked if one.count == GPUS]
    idle = ", ".join(f"{seconds:.0f} {where}" for where, seconds in idle_gpu_seconds(spans, first, last).items())
    print(
        f"\n{TASKS} tasks in {last - first:.1f} s: {used:.0f} of {had:.0f} GPU-seconds used, {used / had:.1%}; "
        f"{held / had:.1%} with the start of the processes"
    )
    print(f"idle GPU-seconds: {idle}")
    print(f"later tasks that were taken before one for {GPUS} GPUs: at most {max(big)[0]}; once it was next: {big}")
    # Once a task for all GPUs is next they are reserved for it, which takes a look of a worker: until then each GPU may
    # go to another task once, and each worker may have one more in hand that it chose before.
    bound = GPUS + len(fleet.workers)
    assert max(when_next for _, when_next in big) <= bound, (bound, big)
