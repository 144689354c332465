"""The contract of an executor, case by case: what is asked, and what must come of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

from tests.conformance.runs import Run, Runs, at_progress, when_hanging


def normal(runs: Runs) -> Run:
    """A request that works, though something prints between its events and leaves a process behind."""
    return runs.of("normal", runs.good(), "litter")


def start(runs: Runs) -> None:
    """It says that it is there, and what it does."""
    run = normal(runs)
    assert (run.events[0].name, run.events[0].data) == ("connection", {"status": "connected"})
    assert run.named("worker")[-1]["status"] in ("working", "cleaning_up", "saving")


def progress(runs: Runs) -> None:
    """It tells how far it is, never backwards, never beyond the total."""
    told = [one for one in normal(runs).named("progress") if one.get("total")]
    done = [one["current"] / one["total"] for one in told]
    assert done
    assert done == sorted(done)
    assert done[-1] == 1


def result(runs: Runs) -> None:
    """It gives its result, and the files that it declares are there."""
    run = normal(runs)
    assert run.ended.completed, run.ended.error
    assert runs.provider.check(run.ended.result), run.ended.result
    assert set(runs.provider.files) <= set(run.ended.artifacts)
    assert [name for name in run.ended.artifacts if not (run.folder / name).exists()] == []


def garbage_on_stdout(runs: Runs) -> None:
    """What is printed between the events becomes a log event and harms nothing."""
    run = normal(runs)
    assert run.ended.completed
    assert "plain text" in [one["message"] for one in run.named("log")]
    assert "a library prints" in [one["message"] for one in run.named("log")]


def cancel(runs: Runs) -> None:
    """SIGTERM in the middle of its work: it ends by itself and says so."""
    run = runs.of("cancel", runs.good(), "slow", stop_at=at_progress)
    assert run.error["type"] == "Cancelled"
    assert [one["status"] for one in run.named("finish")] == ["cancelled"]
    assert run.exit_code == 128 + signal.SIGTERM


def timeout(runs: Runs) -> None:
    """It works longer than its limit: stopped, and not to be tried again."""
    run = runs.of("timeout", runs.good(), "slow", deadline_seconds=1)
    assert (run.error["type"], run.error["retryable"]) == ("TimeLimitExceeded", False)


def silent_hang(runs: Runs) -> None:
    """It says nothing more and does not react to SIGTERM: killed after the grace."""
    run = runs.of("hang", runs.good(), "hang", stop_at=when_hanging, grace_seconds=0.2)
    assert run.error["type"] == "TimeLimitExceeded"
    assert run.ended.end is not None
    assert run.ended.end.signal == signal.SIGKILL


def crash(runs: Runs) -> None:
    """A library takes the process down: another attempt may do."""
    run = runs.of("crash", runs.good(), "crash")
    assert (run.error["type"], run.error["retryable"]) == ("ChildKilled", True)
    assert "SIGSEGV" in run.error["message"]


def out_of_memory(runs: Runs) -> None:
    """It runs out of memory and says so: another attempt may do."""
    run = runs.of("memory", runs.good(), runs.provider.fault)
    assert (run.error["type"], run.error["retryable"]) == ("OutOfMemory", True)
    assert run.exit_code == 1


def bad_input(runs: Runs) -> None:
    """What no attempt can do is refused, with the field named."""
    run = runs.of("bad", runs.bad())
    assert (run.error["type"], run.error["retryable"]) == ("BadInput", False)
    assert run.error["message"]
    assert run.exit_code == 1


def exit_against_finish(runs: Runs) -> None:
    """It says completed, but its exit code says no."""
    run = runs.of("contradiction", runs.good(), "contradict")
    assert run.error["type"] == "Contradiction"


def no_finish(runs: Runs) -> None:
    """It leaves without a word."""
    run = runs.of("leave", runs.good(), "leave")
    assert run.error["type"] == "NoFinish"


def merge_children(runs: Runs) -> None:
    """The calls of three callers in one request: one bad child fails alone."""
    children = [
        {"id": name, "spec": spec} for name, spec in (("a", runs.good()), ("b", runs.bad()), ("c", runs.good()))
    ]
    run = runs.of("merged", {"merge_children": children})
    assert run.ended.completed, run.ended.error
    given = run.ended.result["children"]
    assert set(given) == {"a", "b", "c"}
    assert runs.provider.check(given["a"])
    assert runs.provider.check(given["c"])
    assert (given["b"]["error"]["type"], given["b"]["error"]["retryable"]) == ("BadInput", False)
    declared = {f"children/{child}/{name}" for child in "ac" for name in runs.provider.files}
    assert declared <= set(run.ended.artifacts)
    assert [name for name in declared if not (run.folder / name).exists()] == []


def clean_after(runs: Runs) -> None:
    """No process of a run is left, whatever it had started: there were some to end."""
    end = normal(runs).ended.end
    assert end is not None
    assert end.stragglers >= 1


CASES: Final[tuple[Callable[[Runs], None], ...]] = (
    start, progress, result, cancel, timeout, crash, out_of_memory, bad_input, silent_hang, garbage_on_stdout,
    exit_against_finish, no_finish, merge_children, clean_after,
)  # fmt: skip
