"""The simulated workers of benchmarks/fleet_scale.py are made of the classes of real ones, and work as those change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpuflow.client import submit
from gpuflow.fleet.registry import Fleet
from tests.fixtures.fleets import fleet
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually

__all__ = ["fleet"]

CLIENTS = Path(__file__).parents[2] / "benchmarks" / "fleet_clients.py"


def test_simulated_workers_are_in_the_registry_and_do_tasks(fleet: TestFleet) -> None:
    command = [sys.executable, str(CLIENTS), str(fleet.settings.redis_url), str(fleet.folder), "0", "2"]
    log = fleet.folder / "clients.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):

        def told(word: str) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, log.read_text()[-2000:]
            found: dict[str, Any] = json.loads(answer)
            return found

        registry = Fleet(fleet.app.redis, fleet.app.keys)
        eventually(lambda: len([one for one in registry.workers() if one.state == "IDLE"]) == 2, within=60)
        tasks = [submit(fleet.echo(output=number), app=fleet.app) for number in range(4)]
        told("open")
        eventually(lambda: told("report")["done"] == 4, within=60)
        assert {task.state for task in tasks} == {"SUCCEEDED"}
