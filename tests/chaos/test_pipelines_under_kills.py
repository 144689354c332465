"""Stages and joins go on, in order and once, while the workers that serve them are killed."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

from gpuflow.client import submit_pipeline
from tests.chaos.accounting import celery_end, check
from tests.chaos.chords import send_chord
from tests.chaos.conftest import LEASE, MORTAL
from tests.chaos.faults import Fault
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

WIDE = 100
STAGES = 5


def test_a_chord_of_100_goes_on_after_its_worker_died_at_the_join(fleet: TestFleet, fault: Fault) -> None:
    options = (*MORTAL, "--max-jobs", "4")
    workers = [fleet.start_worker(name, *options, env={**LEASE, **fault.env}) for name in ("w1", "w2")]
    fault.arm("joining")

    sent = send_chord(fleet, WIDE)

    dead = eventually(fault.struck, within=120, what="a worker dead at the join")
    assert dead in [worker.pid for worker in workers]
    assert celery_end(fleet, sent.body, within=60) == list(range(WIDE))
    check(fleet, sent.header)
    assert sent.runs(fleet) == 1


def test_a_pipeline_of_5_goes_on_after_a_kill_in_each_stage(fleet: TestFleet, tmp_path: Path) -> None:
    worker = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)
    run = submit_pipeline(
        {
            "apiVersion": "gpuflow/v1",
            "kind": "Pipeline",
            "metadata": {"name": "killed"},
            "spec": {
                "taskType": "echo",
                "graph": {"nodes": [_node(number, tmp_path) for number in range(1, STAGES + 1)]},
            },
        },
        app=fleet.app,
    )
    for number in range(1, STAGES + 1):
        stage = f"s{number}"
        eventually(lambda: run[stage].tasks and run[stage].tasks[0].state == "RUNNING", what=f"{stage} running")  # noqa: B023

        worker.send(signal.SIGKILL)
        worker.process.wait(timeout=patient(30))
        (tmp_path / stage).touch()
        worker = fleet.start_worker("w1", "--max-jobs", "1", env=LEASE)

    eventually(lambda: run.state.final, within=60, what="the end of the pipeline")
    assert run.state == "SUCCEEDED"
    ids = [task.id for number in range(1, STAGES + 1) for task in run[f"s{number}"].tasks]
    assert len(ids) == STAGES
    records = check(fleet, ids)
    assert [record.losses for record in records] == [1] * STAGES
    for earlier, later in itertools.pairwise(records):
        assert later.started_at >= earlier.finished_at
    assert run[f"s{STAGES}"].result["output"] == "1-2-3-4-5"


def _node(number: int, gates: Path) -> dict[str, Any]:
    output = f"${{s{number - 1}.output}}-{number}" if number > 1 else "1"
    return {
        "name": f"s{number}",
        "dependsOn": [f"s{number - 1}"] if number > 1 else [],
        "spec": {"taskType": "echo", "echo": {"output": output, "until_exists": str(gates / f"s{number}")}},
    }
