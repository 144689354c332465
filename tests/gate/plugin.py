"""What the gate adds to every run of pytest: logs of failed tests, leftover processes, stray errors, a report as JSON.

With GATE_REPORT set, the file of that name holds what came of the run (`RunReport`), for tests/gate/suite.py.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.gate import durations, leftovers, selection
from tests.support.waiting import BrokenPromise, patient

#: How long the processes of a module may take to end after it, in seconds.
END_SECONDS: Final = 10.0
#: So much of the end of each log stands in the report of a failed test.
LOG_CHARACTERS: Final = 30_000
_STRAY: Final = (pytest.PytestUnraisableExceptionWarning, pytest.PytestUnhandledThreadExceptionWarning)
_mark = ""


@dataclass(kw_only=True)
class RunReport:
    """What came of one run of pytest. Each failure: node_id, phase, seconds, error, broken_promise, load."""

    collected: int = 0
    reported: int = 0
    passed: int = 0
    skipped: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    #: What belongs to no test, and reddens the run: exceptions that nobody waited for, in threads and in finalizers;
    #: test processes that died; processes that outlived all tests.
    strays: list[str] = field(default_factory=list)


_report = RunReport()
_reported: set[str] = set()


# -- which files are read, and in which order --------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which `-m` would leave nothing: of a small suite that import is most of the start."""
    names = selection.required(config.option.markexpr)
    if not names or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return None if selection.may_have(collection_path.read_text("utf-8"), names) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Let the long files begin first. Within a file the order stays."""
    places = durations.longest_first((_file_of(item) for item in items), durations.read())
    items.sort(key=lambda item: places[_file_of(item)])


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


# -- in each process that runs tests ----------------------------------------------------------------------------------


def pytest_sessionstart(session: pytest.Session) -> None:
    """Mark what our tests start, and have it end when we end."""
    global _mark
    _mark = leftovers.mark_this_process()
    session.config.stash[_GUARD] = leftovers.start_guard(_mark)


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail where a process that a module started outlives it."""
    yield
    left = leftovers.wait_for_none(_mark, patient(END_SECONDS))
    if left:
        raise BrokenPromise("processes outlived their module: " + "; ".join(map(str, left)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Put the logs of workers and brokers into the report of a failure, and say whether a promise was broken."""
    report = yield
    if report.failed:
        report.load = os.getloadavg()[0]
        report.broken_promise = call.excinfo is not None and _broke_a_promise(call.excinfo.value)
        fleets = sys.modules.get("tests.support.fleet")
        for path in fleets.log_paths() if fleets else ():
            report.sections.append((f"Captured log of {path.name}", path.read_text(errors="replace")[-LOG_CHARACTERS:]))
    return report


# -- in the process that reports --------------------------------------------------------------------------------------


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the tests, where no other processes run them."""
    _report.collected = max(_report.collected, len(session.items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """Count the tests, where other processes run them."""
    _report.collected = max(_report.collected, len(ids))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note a test process that died: what its tests would have shown is unknown. And what it has left."""
    if error:
        _report.strays.append(f"test process {node.gateway.id} ended: {error}")
    _report.strays.extend(getattr(node, "workeroutput", {}).get(_LEFT, ()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what came of a test."""
    _reported.add(report.nodeid)
    if report.failed:
        _report.failures.append(
            {
                "node_id": report.nodeid,
                "phase": report.when,
                "seconds": round(report.duration, 1),
                "error": _first_line(report),
                "broken_promise": getattr(report, "broken_promise", False),
                "load": round(getattr(report, "load", 0.0), 1),
            }
        )
    elif report.when == "call" and report.passed:
        _report.passed += 1
    elif report.skipped:
        _report.skipped += 1


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a module that could not be imported."""
    if report.failed:
        _report.failures.append(
            {"node_id": report.nodeid, "phase": "collect", "seconds": 0.0, "error": _first_line(report),
             "broken_promise": False, "load": 0.0}
        )  # fmt: skip


def pytest_warning_recorded(warning_message: warnings.WarningMessage, nodeid: str) -> None:
    """Note an exception that nobody waited for. It shows in whatever test runs when it is found."""
    if issubclass(warning_message.category, _STRAY):
        lines = [line for line in str(warning_message.message).splitlines() if line.strip()]
        # What pytest adds at the end is advice.
        lines = [line for line in lines if not line.startswith(("Enable tracemalloc", "See https://"))]
        _report.strays.append(f"{lines[0]} ... {lines[-1]} (seen in {nodeid or 'no test'})")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Redden a run with what belongs to no test, and write the report."""
    left = []
    if not session.config.pluginmanager.hasplugin("dsession"):  # there the processes are those that run the tests
        left = [one for kind in ("", "/session") for one in leftovers.wait_for_none(_mark + kind, patient(END_SECONDS))]
    strays = [f"outlived its test process: {one}" for one in left]
    guard = session.config.stash[_GUARD]
    guard.stdin.close()
    try:
        guard.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:  # somebody has inherited its standard input
        guard.kill()
        guard.wait()
    gc.collect()
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput[_LEFT] = strays  # type: ignore[attr-defined]
        return
    _report.strays.extend(strays)
    if _report.strays and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    _report.reported = len(_reported)
    if path := os.environ.get("GATE_REPORT"):
        fresh = Path(f"{path}.{time.monotonic_ns()}")
        fresh.write_text(json.dumps(asdict(_report)))
        fresh.replace(path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what belongs to no test."""
    if _report.strays:
        terminalreporter.section("what belongs to no test", red=True)
        for stray in _report.strays:
            terminalreporter.line(stray)


_GUARD: Final = pytest.StashKey[Any]()
_LEFT: Final = "gate_left"


def _broke_a_promise(error: BaseException) -> bool:
    """Whether this is, or several errors of one clean-up hold, a broken promise."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_broke_a_promise, error.exceptions))
    return isinstance(error, BrokenPromise)


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr).strip().rpartition("\n")[2]
    return (text.strip().splitlines() or [""])[0][:300]
