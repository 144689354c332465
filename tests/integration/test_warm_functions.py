"""Functions that stay warm: one loaded process answers their calls, alone or in batches, until it is not needed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from tests.support.boxes import Box
from tests.support.fleet import TestFleet, WorkerProcess, running
from tests.support.waiting import eventually, patient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import team_warm  # registers its tasks for the app of the fleet, too

PREFIX = team_warm.__name__


def send(fleet: TestFleet, name: str, *args: Any, **options: Any) -> Any:
    fleet.app.finalize()
    return fleet.app.send_task(f"{PREFIX}.{name}", args=args, **options)


def answer(fleet: TestFleet, name: str, *args: Any, **options: Any) -> Any:
    return send(fleet, name, *args, **options).get(timeout=patient(30))


def sessions(worker: WorkerProcess, word: str) -> list[str]:
    return [line for line in worker.log().splitlines() if f"event=session_{word}" in line]


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One broker for all tests of this file."""
    return long_fleet


@pytest.fixture(scope="module")
def worker(fleet: TestFleet) -> WorkerProcess:
    return fleet.start_worker("w1", "--include", PREFIX)


def test_the_process_of_a_call_answers_the_next_ones(fleet: TestFleet, worker: WorkerProcess) -> None:
    pids = {answer(fleet, "on_cpu") for _ in range(4)}

    assert len(pids) == 1 and pids != {worker.process.pid}
    sent = send(fleet, "on_cpu")
    assert sent.get(timeout=patient(30)) in pids
    record = fleet.app.ledger.get(sent.id)
    assert (record.state, record.attempt, record.queue) == ("SUCCEEDED", 1, "cpu")
    assert len([line for line in sessions(worker, "opened") if "on_cpu" in line]) == 1
    assert not (fleet.results / sent.id).exists(), "it has left nothing, and printed nothing"


def test_a_process_that_nobody_calls_ends(fleet: TestFleet, worker: WorkerProcess) -> None:
    pid = answer(fleet, "briefly")

    eventually(lambda: not running([pid]), within=30, what="its end")
    assert answer(fleet, "briefly") != pid


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [("exit", "TaskFailed", "exit code 3"), ("segfault", "TaskFailed", "SIGSEGV"), ("raise", "ValueError", "not that")],
)
def test_however_a_call_ends_it_fails_alone_and_at_once(
    fleet: TestFleet, worker: WorkerProcess, how: str, kind: str, words: str
) -> None:
    before = answer(fleet, "end", "well")["pid"]
    sent = send(fleet, "end", how)

    with pytest.raises(Exception, match=words) as raised:
        sent.get(timeout=patient(30))

    assert type(raised.value).__name__ == kind
    record = fleet.app.ledger.get(sent.id)
    assert (record.state, record.attempt) == ("FAILED", 1)
    after = answer(fleet, "end", "well")["pid"]
    assert (after == before) == (how == "raise")  # what it raises harms no process


def test_a_soft_limit_interrupts_a_call_and_the_process_stays(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    told = answer(fleet, "end", "sleep", str(tmp_path / "pid"), soft_time_limit=patient(1))

    assert told["stopped"] == "softly"
    assert answer(fleet, "end", "well")["pid"] == told["pid"]


def test_what_cannot_be_interrupted_ends_with_its_process(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    with pytest.raises(TimeLimitExceeded):
        answer(fleet, "end", "sleep", str(tmp_path / "limited"), time_limit=1)
    pid = int((tmp_path / "limited").read_text())
    eventually(lambda: not running([pid]), what="its end by a hard limit")

    sent = send(fleet, "end", "sleep", str(tmp_path / "revoked"))
    pid = int(eventually(lambda: (tmp_path / "revoked").exists() and (tmp_path / "revoked").read_text(), what="a call"))
    other = send(fleet, "end", "well")
    sent.revoke(terminate=True)
    eventually(lambda: sent.state == "REVOKED", what="its end by a user")
    eventually(lambda: not running([pid]), what="no process of it")
    assert other.get(timeout=patient(30))["pid"] != pid
    assert fleet.state(sent.id) == "CANCELLED"


def test_a_call_that_waits_has_limits_of_its_own(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    """Short calls are sent ahead: one of them then finds itself behind a long one."""
    for _ in range(3):
        answer(fleet, "end", "well")
    long = send(fleet, "end", "sleep", str(tmp_path / "long"))
    eventually(lambda: (tmp_path / "long").exists(), what="a long call")

    with pytest.raises(SoftTimeLimitExceeded):
        answer(fleet, "end", "well", soft_time_limit=1)

    behind = send(fleet, "end", "well")
    fleet.app.cancel_task(behind.id)
    eventually(lambda: fleet.state(behind.id) == "CANCELLED", what="its cancel")
    assert fleet.state(long.id) == "RUNNING"
    fleet.app.cancel_task(long.id)
    eventually(lambda: fleet.state(long.id) == "CANCELLED", what="the end of the long one")


def test_the_surface_of_celery_is_that_of_any_function(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    sent = send(fleet, "end", "retry")
    told = sent.get(timeout=patient(30))
    assert (told["retries"], told["id"]) == (1, sent.id)

    double = fleet.app.signature(f"{PREFIX}.together")
    both = chord([double.clone((1,)), double.clone((2,))], fleet.app.signature(f"{PREFIX}.count"))
    assert both.apply_async().get(timeout=patient(30)) == 2
    linked = chain(fleet.app.signature(f"{PREFIX}.Model.value", args=("a",)), fleet.app.signature(f"{PREFIX}.count"))
    assert linked.apply_async().get(timeout=patient(30)) == 2

    pid, loaded_in, retries = answer(fleet, "of_class", str(tmp_path), 2)
    assert (pid, retries) == (loaded_in, 2)


def test_the_methods_of_a_class_share_what_it_has_loaded(fleet: TestFleet, worker: WorkerProcess) -> None:
    first, value = answer(fleet, "Model.value", "b")
    second, total = fleet.app.send_task(f"{PREFIX}.Model.total", kwargs={"factor": 10}).get(timeout=patient(30))

    assert (value, total) == (2, 30)
    assert first == second != worker.process.pid
    assert fleet.app.tasks[f"{PREFIX}.Model.value"]("a") == (os.getpid(), 1)  # called directly, it is loaded here


def test_what_cannot_be_loaded_fails_each_call_with_the_cause(fleet: TestFleet, worker: WorkerProcess) -> None:
    for _ in range(2):
        with pytest.raises(LookupError, match="no weights here"):
            answer(fleet, "Broken.answer")


def test_calls_are_answered_together_and_a_bad_one_fails_alone(fleet: TestFleet, worker: WorkerProcess) -> None:
    def largest_list() -> int:
        """Send more calls than one list holds, and check their answers."""
        sent = [send(fleet, "together", number) for number in range(-2, 30)]
        ends = [one.get(timeout=patient(30), propagate=False) for one in sent]
        assert [type(end) for end in ends[:2]] == [ValueError, ValueError]
        assert [end["double"] for end in ends[2:]] == [2 * number for number in range(30)]
        largest = max(end["size"] for end in ends[2:])
        assert largest <= 8
        return int(largest)

    answer(fleet, "together", 1)
    # How many come within 100 ms is up to the machine; a full list does at some time.
    eventually(lambda: largest_list() == 8, within=60, what="a full list")

    sent = [send(fleet, "together", number) for number in (1, -20, 3)]
    ends = [one.get(timeout=patient(30), propagate=False) for one in sent]
    assert [end["double"] for end in (ends[0], ends[2])] == [2, 6]
    assert "far too small" in str(ends[1])


def test_what_a_call_prints_is_in_its_own_log(fleet: TestFleet, worker: WorkerProcess) -> None:
    first, second = send(fleet, "says", "the first"), send(fleet, "says", "the second")
    for sent in (first, second):
        sent.get(timeout=patient(30))

    for sent, said, other in ((first, "the first", "the second"), (second, "the second", "the first")):
        text = "\n".join(str(event.data) for event in fleet.app.event_log.read(sent.id))
        assert said in text and other not in text


@pytest.mark.parametrize("kind", ["long", "SessionClosing", "EngineDied"])
def test_whatever_an_exception_is_called_and_says_the_call_fails_once(
    fleet: TestFleet, worker: WorkerProcess, kind: str
) -> None:
    sent = send(fleet, "raises", kind)

    with pytest.raises(Exception, match="xxx" if kind == "long" else "of the team"):
        sent.get(timeout=patient(30))

    record = fleet.app.ledger.get(sent.id)
    assert (record.state, record.attempt) == ("FAILED", 1)
    assert answer(fleet, "raises", "nothing") == "nothing"


def test_calls_of_a_list_that_are_made_alone_print_alone(fleet: TestFleet, worker: WorkerProcess) -> None:
    sent = {word: send(fleet, "prints", word) for word in ("alpha", "beta")}
    for word, one in sent.items():
        assert one.get(timeout=patient(30)) == word

    for word, other in (("alpha", "beta"), ("beta", "alpha")):
        text = "\n".join(str(event.data) for event in fleet.app.event_log.read(sent[word].id))
        assert f"given {word}" in text and f"given {other}" not in text


def test_one_that_asks_is_told_to_end_and_its_process_stays(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "one"
    sent = send(fleet, "stops", str(path))
    eventually(path.exists, what="a call")

    fleet.app.cancel_task(sent.id)

    eventually(lambda: fleet.state(sent.id) == "CANCELLED", what="its end")
    assert path.read_text() == "asked"
    ended = len(sessions(worker, "ended"))
    again = send(fleet, "stops", str(tmp_path / "two"))
    eventually((tmp_path / "two").exists, what="another call")
    assert len(sessions(worker, "ended")) == ended
    fleet.app.cancel_task(again.id)
    eventually(lambda: fleet.state(again.id) == "CANCELLED", what="its end")


def test_a_load_may_call_its_own_tasks(fleet: TestFleet, worker: WorkerProcess) -> None:
    assert answer(fleet, "Calls.double", 4) == 8
    assert f"{PREFIX}.Calls.helper" not in fleet.app.tasks


def test_gpus_are_kept_by_the_process_and_given_to_who_needs_them(fleet: TestFleet, tmp_path: Path) -> None:
    with Box(fleet, "two", "2xA100-80GB") as box:
        on_two = box.start("two", "--include", PREFIX)
        first = answer(fleet, "where", "one")
        assert answer(fleet, "where", "two")["pid"] == first["pid"]
        assert len(first["gpus"].split(",")) == 1

        long = send(fleet, "waits", "a", str(tmp_path))
        eventually(lambda: (tmp_path / "a.begun").exists(), what="a long call")
        beside = send(fleet, "waits", "b", str(tmp_path))  # the other GPU is the other function's, which idles
        eventually(lambda: (tmp_path / "b.begun").exists(), what="a second process")
        for name in "ab":
            (tmp_path / f"{name}.go").touch()
        one, other = long.get(timeout=patient(30)), beside.get(timeout=patient(30))
        assert one[0] != other[0] and one[1] != other[1] and not running([first["pid"]])

        assert len(answer(fleet, "both").split(",")) == 2
        eventually(lambda: not running([one[0], other[0]]), what="room for both")
        assert "event=session_evicted" in on_two.log()
