"""A stage that calls a function, and whose worker is killed: one committed result, and the pipeline goes on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from gpuflow import PipelineRun, submit_pipeline
from gpuflow.broker.scripts import Script
from gpuflow.ledger.ledger import ledger_script
from tests.chaos.conftest import LEASE
from tests.chaos.test_function_deaths import KillingProxy
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

OPTIONS = ("--include", "team_stages")


def submitted(fleet: TestFleet, name: str, *args: Any) -> PipelineRun:
    def call(function: str, *given: Any) -> dict[str, Any]:
        return {"taskType": "function", "function": {"name": f"team_stages.{function}", "args": list(given)}}

    stages = [{"name": "one", "spec": call(name, *args)}, {"name": "two", "spec": call("same", "${one.result.value}")}]
    return submit_pipeline({"apiVersion": "gpuflow/v1", "spec": {"stages": stages}}, app=fleet.app)


def value_of(run: PipelineRun) -> Any:
    result = run["two"].result
    assert result is not None
    return result["value"]


def nothing_is_left(fleet: TestFleet) -> None:
    client, keys = fleet.broker.client, fleet.app.keys
    eventually(lambda: not client.smembers(keys.unfinished), what="nothing unfinished")
    eventually(lambda: not client.hlen(keys.unacked), what="nothing unacknowledged")


def test_a_worker_that_is_killed_in_a_call(fleet: TestFleet, tmp_path: Path) -> None:
    begun, until = tmp_path / "begun", tmp_path / "until"
    first = fleet.start_worker("first", *OPTIONS, env=LEASE)
    run = submitted(fleet, "waits", str(begun), str(until))
    eventually(begun.exists, what="a call that runs")

    first.send(signal.SIGKILL)
    fleet.start_worker("next", *OPTIONS, env=LEASE)
    eventually(lambda: len(begun.read_text().splitlines()) == 2, what="the call, once more")
    until.touch()
    run.wait(timeout=patient(60))

    assert value_of(run) == "done"
    record = run["one"].tasks[0].record()
    assert (record.attempt, [entry.outcome for entry in run["one"].tasks[0].attempts()]) == (2, ["lost", "succeeded"])
    nothing_is_left(fleet)


#: What the function does, the step at whose so many-th time its worker dies, and what comes of it.
WAYS: dict[str, tuple[str, tuple[Any, ...], Script, int, Any]] = {
    "a retry goes back": ("third_try", (), ledger_script("yield"), 2, [2, 100]),
    "it is replaced": ("replaces", ("by a function",), ledger_script("yield"), 1, [11, 12]),
    "what replaces it begins": ("replaces", ("by a function",), ledger_script("start"), 2, [11, 12]),
    "what replaces it is committed": ("replaces", ("by a function",), ledger_script("commit"), 1, [11, 12]),
    "it says Ignore": ("ends", ("ignore",), ledger_script("commit"), 1, None),
}


@pytest.mark.parametrize("passes", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_dies_when(fleet: TestFleet, way: str, passes: bool) -> None:
    name, args, script, at, result = WAYS[way]
    for one in ("start", "yield", "commit", "report"):
        ledger_script(one).load(fleet.broker.client)  # so that the first answer is not that the server does not know it
    with KillingProxy(fleet.broker.url, script, at=at, passes=passes) as proxy:
        dying = WorkerProcess(proxy.url, fleet.folder, "dying", *OPTIONS, env={**fleet.env, **LEASE})
        fleet.workers.append(dying.ready())
        proxy.kill = lambda: dying.send(signal.SIGKILL)
        run = submitted(fleet, name, *args)
        eventually(lambda: dying.process.poll() is not None, what="its death")
        fleet.start_worker("next", *OPTIONS, env=LEASE)

        run.wait(timeout=patient(60))

    assert value_of(run) == result
    nothing_is_left(fleet)
