"""A warm function whose worker is killed at each step of its calls, before the broker takes the step and after.

The workers of all steps die beside each other, each with calls that it alone may take; another one then answers what
they have left. What becomes of the calls of a process that dies itself: `test_warm_process_deaths`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from gpuflow.broker.scripts import Script, broker_script
from gpuflow.ledger.ledger import ledger_script
from gpuflow.ledger.records import TaskRecord
from tests.chaos.accounting import check
from tests.chaos.conftest import LEASE
from tests.chaos.killing import KillingProxy, functions_left, load_steps, locked
from tests.fixtures.simulated_nvml import SimGpu, simulated_machine
from tests.support.fleet import TestFleet, WorkerProcess, gone
from tests.support.waiting import eventually, promised

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import team_mortal

PREFIX: Final = team_mortal.__name__
OPTIONS: Final = ("--include", PREFIX, "-c", "8")
#: What ends an attempt that is not the last one, by no fault of the function; and a retry.
NO_FAULTS: Final = frozenset({"lost", "preempted"})
#: The number of the call that others wait behind, to be one list.
FIRST: Final = 9


@dataclass(frozen=True, kw_only=True)
class Way:
    """What is called when a worker dies at the `at`-th of a step: so many calls, after one that opens the session.

    `retries` of each call; `waits`: the process is killed at the first call, so that those behind it go back; `evicts`:
    it is another function that is called, for which the idle session makes room; `together`: they are of one list.
    """

    step: Script
    at: int = 1
    calls: int = 3
    is_warm: bool = True
    retries: int = 0
    waits: bool = False
    evicts: bool = False
    together: bool = False
    gpu: str = ""

    @property
    def name(self) -> str:
        """The function that is called."""
        return "other" if self.evicts else "together" if self.together else "single"


WAYS: Final[Mapping[str, Way]] = {
    "the first call starts": Way(step=ledger_script("start"), is_warm=False, gpu="A100:1"),
    "a call joins at the pop": Way(step=broker_script("pop")),
    "an idle session is to make room": Way(step=broker_script("pop"), evicts=True, gpu="H100:1"),
    "a call that has joined starts": Way(step=ledger_script("start"), at=2),
    "a call is told of as running": Way(step=ledger_script("report"), at=2),
    "a result is committed": Way(step=ledger_script("commit"), at=2),
    "a result of a list is committed": Way(step=ledger_script("commit"), at=3, together=True, calls=4),
    "a retry goes back": Way(step=ledger_script("yield"), retries=1),
    "calls that waited go back": Way(step=ledger_script("yield"), waits=True),
    "calls of a list go back": Way(step=ledger_script("yield"), together=True, calls=4, waits=True),
}


@dataclass(kw_only=True)
class Death:
    """A worker that dies, and the calls that it had: task id -> number."""

    way: Way
    proxy: KillingProxy
    worker: WorkerProcess
    resources: dict[str, Any]
    folder: Path
    calls: dict[str, int] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)

    def kill(self) -> None:
        """Kill the worker, and remember what it has started."""
        self.left = [child.pid for child in self.worker.children()]
        self.worker.send(signal.SIGKILL)


@dataclass(kw_only=True)
class Night:
    """All the deaths of one kind, and what has become of the calls."""

    fleet: TestFleet
    passes: bool
    deaths: dict[str, Death] = field(default_factory=dict)

    def begin(self, stack: contextlib.ExitStack, env: Mapping[str, str]) -> None:
        """Start a worker for each way to die."""
        for number, (title, way) in enumerate(WAYS.items()):
            proxy = stack.enter_context(KillingProxy(self.fleet.broker.url, way.step, at=way.at, passes=self.passes))
            label = f"way-{number}-{self.passes}".lower()
            worker = WorkerProcess(
                proxy.url,
                self.fleet.folder,
                label,
                *self.fleet.options,
                *OPTIONS,
                "--label",
                f"{label}=1",
                env={**self.fleet.env, **LEASE, **env},
            )
            self.fleet.workers.append(worker)
            folder = self.fleet.folder / label
            folder.mkdir(exist_ok=True)
            gpus = {"accelerators": way.gpu} if way.gpu else {"hardware": {"gpu": {"count": 0}}}
            resources = {"labels": {label: "1"}, **gpus}
            self.deaths[title] = Death(way=way, proxy=proxy, worker=worker, resources=resources, folder=folder)

    def send(self, death: Death, name: str, number: int, *more: Any) -> str:
        """Make a call that this worker alone may take."""
        args = (str(death.folder), number, *more)
        sent = self.fleet.app.send_task(f"{PREFIX}.{name}", args=args, resources=death.resources)
        death.calls[sent.id] = number
        return str(sent.id)

    def warm_up(self, death: Death) -> None:
        """Let the worker have an idle process that has answered a call."""
        death.worker.ready()
        if death.way.is_warm:
            first = self.send(death, "single" if death.way.evicts else death.way.name, 0)
            eventually(lambda: self.fleet.state(first) == "SUCCEEDED", within=60, what="a process that is warm")

    def bring_about(self, death: Death) -> None:
        """Make the calls at which the worker dies."""
        way, until = death.way, str(death.folder / "go") if death.way.waits else ""
        more = [] if way.evicts else [until] if way.together else [until, way.retries]
        pops = way.step is broker_script("pop")
        if pops:  # the next pop finds them
            death.proxy.stall()
        else:
            death.proxy.kill = death.kill
        behind = self.begin_one(death) if way.together else ""
        for number in range(1, way.calls + 1):
            self.send(death, way.name, number, *more)
        if pops:
            death.proxy.kill = death.kill
            death.proxy.allow()
        if way.waits or way.together:
            eventually(
                lambda: len(self.running(death)) == way.calls + way.together, what="calls that wait in the process"
            )
        if behind:
            Path(behind).touch()
        if way.waits:
            at_work = way.calls if way.together else 1
            begun = eventually(lambda: len(found := self.noted(death)) == at_work and found, what="calls at work")
            os.kill(int(begun[0].suffix[1:]), signal.SIGKILL)

    def begin_one(self, death: Death) -> str:
        """Let a call work until a file is there, which is returned: those that are sent meanwhile are one list."""
        until = str(death.folder / "go-first")
        self.send(death, death.way.name, FIRST, until)
        eventually(lambda: list(death.folder.glob(f"{FIRST}.*")), what="a call at work")
        return until

    def noted(self, death: Death) -> list[Path]:
        """Return what calls have noted when they began, but for those that were there before."""
        return [path for path in death.folder.glob("[0-9]*.*") if 0 < int(path.stem) < FIRST]

    def running(self, death: Death) -> list[str]:
        """Return the calls that run by their records: one of them works, and others wait in the process."""
        return [task for task in death.calls if self.fleet.state(task) == "RUNNING"]

    def rescue(self, env: Mapping[str, str]) -> None:
        """Let another worker answer what is left, and see that it leaves nothing."""
        labels = [word for death in self.deaths.values() for word in ("--label", f"{death.worker.name}=1")]
        rescuer = self.fleet.start_worker(f"next-{self.passes}".lower(), *OPTIONS, *labels, env={**LEASE, **env})
        every = [task for death in self.deaths.values() for task in death.calls]
        check(self.fleet, every, state=None, within=25)
        rescuer.stop()
        gone([pid for death in self.deaths.values() for pid in death.left], "no process of the workers that died")
        eventually(lambda: not functions_left(self.fleet), what="no process of a function left")


@pytest.fixture(scope="module", params=[False, True], ids=["before", "after"])
def night(long_fleet: TestFleet, request: pytest.FixtureRequest) -> Night:
    """Let a worker die in each way, and another one answer what is left."""
    fleet, env = long_fleet, simulated_machine(long_fleet.folder, [SimGpu(model="A100-80GB"), SimGpu(model="H100")])
    fleet.app.finalize()
    load_steps(fleet)
    made = Night(fleet=fleet, passes=request.param)
    with contextlib.ExitStack() as stack:
        made.begin(stack, env)
        for death in made.deaths.values():
            made.warm_up(death)
        for death in made.deaths.values():
            made.bring_about(death)
        for title, death in made.deaths.items():
            eventually(lambda: death.worker.process.poll() is not None, what=f"the death when {title}")  # noqa: B023
            (death.folder / "go").touch()
        made.rescue(env)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_each_call_has_one_result_though_its_worker_dies_when(night: Night, way: str) -> None:
    death = night.deaths[way]
    records = {task: night.fleet.app.ledger.get(task) for task in death.calls}
    victims = [one for one in records.values() if one.state != "SUCCEEDED"]

    # Who worked when its process was killed has failed by that, unless its worker died before it could say so.
    assert len(victims) <= (death.way.waits and death.way.name == "single"), victims
    assert [str((one.error or {}).get("type")) for one in victims] == ["ChildKilled"] * len(victims)
    for task, number in death.calls.items():
        if records[task] not in victims:
            assert (records[task].result or {})["value"] == 2 * number
        check_history(night.fleet, records[task], retries=death.way.retries if number else 0)


def check_history(fleet: TestFleet, record: TaskRecord, *, retries: int) -> None:
    """Assert that each attempt but the last one ended by no fault of the call, or by a retry of its own."""
    earlier = fleet.app.ledger.attempts(record.id)[:-1]
    retried = [entry for entry in earlier if entry.outcome == "failed"]
    promised(
        [str((entry.error or {}).get("type")) for entry in retried] == ["Retry"] * retries
        and {entry.outcome for entry in earlier if entry not in retried} <= NO_FAULTS
        and record.losses <= 1,
        f"{record.id}: its attempts are {earlier}",
    )


def test_no_gpu_stays_locked(night: Night) -> None:
    assert locked(night.fleet) == []
