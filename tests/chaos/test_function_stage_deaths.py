"""A stage that calls a function, and whose worker is killed: one committed result, and the pipeline goes on."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from gpuflow import PipelineRun, submit_pipeline
from gpuflow.broker.scripts import Script
from gpuflow.ledger.ledger import ledger_script
from tests.chaos.conftest import LEASE
from tests.chaos.killing import KillingProxy, load_steps
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient

OPTIONS = ("--include", "team_stages")


def only(label: str) -> dict[str, Any]:
    """Return what a task asks for that one worker alone may take."""
    return {"labels": {label: "1"}, "hardware": {"gpu": {"count": 0}}}


def submitted(fleet: TestFleet, name: str, *args: Any, labels: tuple[str, str] = ("", "")) -> PipelineRun:
    """Submit two stages, each for a worker with a label, where one is given."""

    def call(label: str, function: str, *given: Any) -> dict[str, Any]:
        section = {"name": f"team_stages.{function}", "args": list(given)}
        return {"taskType": "function", "function": section, **({"resources": only(label)} if label else {})}

    one, two = call(labels[0], name, *args), call(labels[1], "same", "${one.result.value}")
    stages = [{"name": "one", "spec": one}, {"name": "two", "spec": two}]
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
def test_workers_that_die_at_each_step(fleet: TestFleet, passes: bool) -> None:
    """They die beside each other, each with a first stage that it alone may take; another one then goes on."""
    load_steps(fleet)
    labels = {way: f"way-{number}" for number, way in enumerate(WAYS)}
    proxies, dying, runs = {}, {}, {}
    with contextlib.ExitStack() as stack:
        for way, (_, _, script, at, _) in WAYS.items():
            proxies[way] = stack.enter_context(KillingProxy(fleet.broker.url, script, at=at, passes=passes))
            own = ("--label", f"{labels[way]}=1")
            dying[way] = WorkerProcess(
                proxies[way].url, fleet.folder, labels[way], *OPTIONS, *own, env={**fleet.env, **LEASE}
            )
            fleet.workers.append(dying[way])
        for way, (name, args, *_) in WAYS.items():
            worker = dying[way].ready()
            proxies[way].kill = lambda worker=worker: worker.send(signal.SIGKILL)  # type: ignore[misc]
            more = [only(labels[way])] if name == "replaces" else []
            runs[way] = submitted(fleet, name, *args, *more, labels=(labels[way], "next"))
        for way, worker in dying.items():
            eventually(lambda: worker.process.poll() is not None, what=f"the death when {way}")  # noqa: B023
        every = [word for label in (*labels.values(), "next") for word in ("--label", f"{label}=1")]
        fleet.start_worker("next", *OPTIONS, *every, env=LEASE)

        for run in runs.values():
            run.wait(timeout=patient(60))

    assert {way: value_of(run) for way, run in runs.items()} == {way: result for way, (*_, result) in WAYS.items()}
    nothing_is_left(fleet)
