"""A warm function whose own process dies or stands still: what it worked on has failed, what waited is answered.

What becomes of the calls of a worker that dies: `test_warm_function_deaths`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import check
from tests.chaos.conftest import LEASE
from tests.chaos.freezing import frozen
from tests.chaos.killing import functions_left
from tests.support.fleet import TestFleet, WorkerProcess, gone
from tests.support.waiting import eventually, patient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import team_mortal

PREFIX: Final = team_mortal.__name__
OPTIONS: Final = ("--include", PREFIX, "-c", "8")


class Calls:
    """Calls of one test: each notes in a folder which process works on it, and waits there for `go`."""

    def __init__(self, fleet: TestFleet, folder: Path, name: str = "single") -> None:
        self.fleet, self.folder, self.name = fleet, folder, name
        self.numbers: dict[str, int] = {}
        fleet.app.finalize()

    def send(self, *numbers: int, waits: bool = True, **options: Any) -> list[str]:
        """Make calls, and return their ids."""
        until = [str(self.folder / "go")] if waits else []
        sent = []
        for number in numbers:
            args = [str(self.folder), number, *until]
            sent.append(str(self.fleet.app.send_task(f"{PREFIX}.{self.name}", args=args, **options).id))
            self.numbers[sent[-1]] = number
        return sent

    def go(self) -> None:
        """Let the calls that wait go on."""
        (self.folder / "go").touch()

    def works(self, *, among: int = 1) -> tuple[str, int]:
        """Wait until so many calls run, and return one that a process works on, with that process."""
        eventually(lambda: len(self.running()) >= among, what=f"{among} calls in the process")
        number, pid = eventually(lambda: self._noted()[-1:], what="a call at work")[0]
        return next(task for task, its in self.numbers.items() if its == number), pid

    def running(self) -> list[str]:
        """Return those that run by their records: a process works on one, and others wait in it."""
        return [task for task in self.numbers if self.fleet.state(task) == "RUNNING"]

    def _noted(self) -> list[tuple[int, int]]:
        paths = sorted(self.folder.glob("[-0-9]*.*"), key=lambda path: path.stat().st_mtime_ns)
        return [(int(path.stem), int(path.suffix[1:])) for path in paths]

    def warm(self) -> int:
        """Let a few calls be answered, so that it is known that they are short, and return the process."""
        for _ in range(3):
            (task,) = self.send(0, waits=False)
            self.ended(task)
        self.numbers.clear()
        pid = self._noted()[-1][1]
        for path in self.folder.glob(f"*.{pid}"):
            path.unlink()
        return pid

    def ended(self, *tasks: str, state: TaskState = TaskState.SUCCEEDED) -> list[TaskRecord]:
        """Wait for the end of calls, and check that each has had one end, and the right result."""
        records = check(self.fleet, tasks, state=state)
        if state is TaskState.SUCCEEDED:
            assert [(one.result or {})["value"] for one in records] == [2 * self.numbers[task] for task in tasks]
        return records

    def history(self, task: str) -> list[tuple[str, str]]:
        """Return how each attempt of a call has ended: its outcome, and the type of its error."""
        return [
            (str(entry.outcome), str((entry.error or {}).get("type"))) for entry in self.fleet.app.ledger.attempts(task)
        ]


SUCCEEDED: Final = ("succeeded", "None")
WENT_BACK: Final = ("preempted", "SessionClosing")


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One broker for all tests of this file."""
    return long_fleet


@pytest.fixture
def worker(fleet: TestFleet) -> WorkerProcess:
    """The one worker of the tests of this file; another one where a test has ended it."""
    last = fleet.workers[-1] if fleet.workers else None
    if last is not None and last.process.poll() is None:
        return last
    return fleet.start_worker(f"w{len(fleet.workers)}", *OPTIONS, env={**LEASE, "SLOW_LOAD": str(fleet.folder)})


@pytest.fixture
def calls(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> Calls:
    """Calls of a function that is warm, in a process that has never made a long call: so some are sent ahead."""
    for pid in functions_left(fleet):
        os.kill(pid, signal.SIGKILL)
        gone([pid])
    made = Calls(fleet, tmp_path)
    made.warm()
    return made


@pytest.mark.parametrize(("name", "waiting"), [("Slow.answer", 1), ("slowly", 4)])
def test_one_that_is_killed_while_it_loads_fails_those_that_wait_for_it(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path, name: str, waiting: int
) -> None:
    """A call waits for its load; of lists as many as it would answer then."""
    calls = Calls(fleet, tmp_path, name)
    sent = calls.send(1, 2, 3, 4, waits=False)
    eventually(lambda: len(calls.running()) == waiting, what="calls that wait")
    (path,) = eventually(lambda: list(fleet.folder.glob("loads.*")), what="its load")
    failed = calls.running()

    os.kill(int(path.suffix[1:]), signal.SIGKILL)

    eventually(lambda: all(fleet.state(task) == "FAILED" for task in failed), what="their failure")
    (fleet.folder / "loaded").touch()
    calls.ended(*(task for task in sent if task not in failed), *calls.send(5, waits=False))
    for record in calls.ended(*failed, state=TaskState.FAILED):
        assert (record.attempt, (record.error or {})["type"]) == (1, "ChildKilled")
    for left in (path, fleet.folder / "loaded", *fleet.folder.glob("loads.*")):
        left.unlink(missing_ok=True)


@pytest.mark.parametrize(("who", "kind"), [("process", "ChildKilled"), ("shim", "ChildLost")])
def test_what_it_worked_on_has_failed_and_what_waited_is_answered(calls: Calls, who: str, kind: str) -> None:
    sent = calls.send(1, 2, 3)
    victim, pid = calls.works(among=3)

    os.kill(pid if who == "process" else psutil.Process(pid).ppid(), signal.SIGKILL)

    eventually(lambda: calls.fleet.state(victim) == "FAILED", what="its failure")
    calls.go()
    others = [task for task in sent if task != victim]
    calls.ended(*others)
    calls.ended(victim, state=TaskState.FAILED)
    assert calls.history(victim) == [("failed", kind)]
    assert [calls.history(task)[-1] for task in others] == [SUCCEEDED] * 2
    assert all(set(calls.history(task)[:-1]) == {WENT_BACK} for task in others)
    gone([pid])


@pytest.mark.parametrize("who", ["process", "shim"])
def test_one_that_is_killed_between_two_calls_is_followed_by_another(calls: Calls, who: str) -> None:
    pid = calls.warm()
    os.kill(pid if who == "process" else psutil.Process(pid).ppid(), signal.SIGKILL)

    sent = calls.send(1, 2, 3, waits=False)

    calls.ended(*sent)
    assert all(set(calls.history(task)[:-1]) <= {WENT_BACK, ("preempted", "HandedBack")} for task in sent)
    gone([pid])


def test_of_a_list_that_kills_its_process_each_is_tried_by_itself(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    calls = Calls(fleet, tmp_path, "together")
    (before,) = calls.send(4)
    calls.works()
    *good, bad = calls.send(1, 2, 3, -9)  # which kills it
    calls.works(among=5)  # so the four that wait are one list

    calls.go()
    calls.ended(before, *good)
    calls.ended(bad, state=TaskState.FAILED)
    for task in good:
        first, *between, last = calls.history(task)
        assert (first, last) == (("preempted", "EngineDied"), SUCCEEDED)
        assert set(between) <= {WENT_BACK}  # it waited behind the bad one
    assert calls.history(bad) == [("preempted", "EngineDied"), ("failed", "ChildKilled")]


def test_one_that_stands_still_ends_by_the_limit_of_a_call(calls: Calls) -> None:
    (limited,) = calls.send(1, time_limit=2)
    _, pid = calls.works()

    os.kill(pid, signal.SIGSTOP)

    waiting = calls.send(2, 3)
    eventually(lambda: calls.fleet.state(limited) == "FAILED", what="its end by the limit")
    calls.go()
    gone([pid], "the process that stood still")
    calls.ended(*waiting)
    calls.ended(limited, state=TaskState.FAILED)
    assert calls.history(limited) == [("failed", "TimeLimitExceeded")]
    assert all(set(calls.history(task)[:-1]) <= {WENT_BACK} for task in waiting)


def test_one_that_is_cancelled_behind_a_call_that_dies_stays_cancelled(calls: Calls) -> None:
    first, second, third = calls.send(1, 2, 3)
    victim, pid = calls.works(among=3)
    cancelled, other = [task for task in (first, second, third) if task != victim]

    assert calls.fleet.app.cancel_task(cancelled) == "requested"
    os.kill(pid, signal.SIGKILL)

    calls.go()
    calls.ended(other)
    calls.ended(cancelled, state=TaskState.CANCELLED)
    calls.ended(victim, state=TaskState.FAILED)


def test_a_broker_that_restarts_meanwhile_costs_no_call_its_result(calls: Calls) -> None:
    sent = calls.send(1, 2, 3)
    calls.works(among=3)

    calls.fleet.broker.kill()
    calls.go()
    calls.fleet.broker.restart()

    calls.ended(*sent)
    assert all({outcome for outcome, _ in calls.history(task)[:-1]} <= {"lost"} for task in sent)


def test_what_a_frozen_worker_has_is_answered_by_another_once(
    calls: Calls, fleet: TestFleet, worker: WorkerProcess
) -> None:
    sent = calls.send(1, 2, 3)
    calls.works(among=3)

    with frozen(worker.pid):
        other = fleet.start_worker("other", *OPTIONS, env=LEASE)
        eventually(
            lambda: any(fleet.app.ledger.get(task).worker == other.name for task in sent), what="one of them there"
        )
        calls.go()  # both processes answer now
        for task in sent:
            eventually(lambda: fleet.state(task) == "SUCCEEDED", what="a result")  # noqa: B023

    records = calls.ended(*sent)
    assert {one.worker for one in records} == {other.name}
    assert [calls.history(task)[0][0] for task in sent] == ["lost"] * 3
    other.stop()
    fleet.workers.remove(other)
    calls.ended(*calls.send(4, waits=False))  # the one that was frozen goes on


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_worker_that_is_told_to_end_leaves_no_call_behind(
    calls: Calls, fleet: TestFleet, worker: WorkerProcess, number: signal.Signals
) -> None:
    sent = calls.send(1, 2, 3)
    _, pid = calls.works(among=3)

    worker.send(number)
    if number is signal.SIGQUIT:
        worker.process.wait(timeout=patient(30))
    calls.go()
    worker.process.wait(timeout=patient(30))
    gone([pid])
    fleet.start_worker(f"after-{number.name.lower()}", *OPTIONS, env=LEASE)

    calls.ended(*sent)
    expected = [[SUCCEEDED]] if number is signal.SIGTERM else [[("preempted", "WorkerLost"), SUCCEEDED]]
    assert all(calls.history(task) in expected for task in sent)


def test_no_process_is_left(fleet: TestFleet, worker: WorkerProcess) -> None:
    worker.stop()
    eventually(lambda: not functions_left(fleet), what="no process of a function")
