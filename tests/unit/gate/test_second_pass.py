"""What the gate tries again, and what it never forgives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.gate import suite
from tests.gate.suite import why_not_again
from tests.support.fleet import running
from tests.support.waiting import eventually, patient

ROOT = Path(__file__).resolve().parents[3]
MOST_KNOWN, MOST_DAYS = 8, 14


def failure(node_id: str = "t.py::test_a", **fields: Any) -> dict[str, Any]:
    one = {"node_id": node_id, "phase": "call", "seconds": 1.0, "error": "E", "broken_promise": False, "load": 0.5}
    return {**one, **fields}


def told(*failures: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"collected": 9, "reported": 9, "failures": list(failures), "strays": [], **fields}


@pytest.mark.parametrize(
    ("code", "run", "flaky_before", "why"),
    [
        (1, told(failure()), 0, ""),
        (1, told(failure("a"), failure("b")), 1, ""),
        (1, told(failure("a", phase="setup"), failure("b")), 0, ""),
        (1, told(failure("a"), failure("a", phase="teardown")), 0, "more than tests failed"),
        (1, told(failure("a", phase="???")), 0, "more than tests failed"),
        (1, told(failure(error="Failed: Timeout (>400.0s) from pytest-timeout.")), 0, "a test came to its time limit"),
        (1, told(failure("a"), failure("b"), failure("c")), 0, "3 tests failed, more than 2"),
        (1, told(failure("a"), failure("b")), 2, "more than 3 tests of this run would be flaky"),
        (1, told(failure(broken_promise=True)), 0, "a promise was broken"),
        (1, told(failure("a"), failure("b", broken_promise=True)), 0, "a promise was broken"),
        (1, told(failure(), reported=8), 0, "9 tests were collected, 8 reported"),
        (1, told(failure(phase="collect")), 0, "more than tests failed"),
        (1, told(), 0, "more than tests failed"),
        (1, told(failure(), strays=["in a thread"]), 0, "something went wrong that belongs to no test"),
        (2, told(failure()), 0, "pytest ended with 2"),
        (-9, {}, 0, "pytest ended with -9"),
        (1, {}, 0, "pytest ended with 1"),
    ],
)
def test_what_may_be_tried_again(code: int, run: dict[str, Any], flaky_before: int, why: str) -> None:
    assert why_not_again(code, run, flaky_before) == why


# -- with real runs of pytest -------------------------------------------------------------------------------------

PREFIX = (
    "import os, pytest, sys, threading\nfrom pathlib import Path\nfrom tests.support.waiting import BrokenPromise\n"
)
#: Those that these runs need: to load all that are installed takes longer than each of them.
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}
#: Fails in the first so many of its runs.
FAILS_FIRST = """
def test_odd():
    counter = Path({folder!r}, "runs")
    counter.write_text(counter.read_text() + "x" if counter.exists() else "x")
    assert len(counter.read_text()) > {times}, "not yet"

def test_good():
    pass
"""


def run_suite(folder: Path, text: str, *options: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Run the suite `s` over one file that has this text; return its exit code, its report and its output."""
    (folder / "conftest.py").write_text('pytest_plugins = ["tests.gate.plugin"]\n')
    (folder / "pytest.ini").write_text("[pytest]\njunit_logging = all\n")
    (folder / "test_it.py").write_text(PREFIX + text)
    done = subprocess.run(
        [sys.executable, "-m", "tests.gate.suite", "s", "test_it.py", "-p", "no:cacheprovider", *options],
        cwd=folder, capture_output=True, text=True, check=False, timeout=patient(100),
        env={**os.environ, "CI": "true", "GATE_DIR": str(folder), "PYTHONPATH": str(ROOT), "TEST_PATIENCE": "0.05",
             "GATE_QUIET_SECONDS": "0", **PLUGINS, **environment},
    )  # fmt: skip
    return done.returncode, json.loads((folder / "s.json").read_text()), done.stdout + done.stderr


def test_a_test_that_passes_alone_three_times_is_flaky_and_forgiven(tmp_path: Path) -> None:
    code, report, out = run_suite(tmp_path, FAILS_FIRST.format(folder=str(tmp_path), times=1))

    assert code == 0, out
    assert report["failures"] == []
    ((odd,), passed) = report["flaky"], report["passed"]
    assert odd["node_id"].endswith("test_it.py::test_odd")
    assert odd["error"].startswith("AssertionError: not yet")
    assert passed == 2
    assert (tmp_path / "runs").read_text() == "xxxx"


def test_one_that_fails_alone_is_red(tmp_path: Path) -> None:
    code, report, _ = run_suite(tmp_path, FAILS_FIRST.format(folder=str(tmp_path), times=3))

    assert code == 1
    assert report["flaky"] == []
    assert report["second_pass"].endswith("test_odd failed again, alone, at try 1")


def test_without_ci_nothing_is_tried_again(tmp_path: Path) -> None:
    code, report, _ = run_suite(tmp_path, FAILS_FIRST.format(folder=str(tmp_path), times=1), CI="")

    assert (code, report["second_pass"]) == (1, "only with CI=true")


def test_a_broken_promise_is_red_at_once(tmp_path: Path) -> None:
    code, report, _ = run_suite(tmp_path, "def test_it():\n    raise BrokenPromise('two on one GPU')\n")

    assert (code, report["second_pass"]) == (1, "a promise was broken")
    assert report["failures"][0]["broken_promise"] is True


def test_a_process_that_outlives_its_module_reddens_it_and_is_ended(tmp_path: Path) -> None:
    text = """
import subprocess
def test_it():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    Path({folder!r}, "pid").write_text(str(process.pid))
    process.returncode = 0  # nobody will hear of it
"""
    code, report, _ = run_suite(tmp_path, text.format(folder=str(tmp_path)), CI="")

    assert code == 1
    (failed,) = report["failures"]
    pid = (tmp_path / "pid").read_text()
    assert (failed["phase"], failed["broken_promise"]) == ("teardown", True)
    assert re.search(rf"processes outlived their module: pid {pid}: \S+ -c import time", failed["error"])
    eventually(lambda: not running([int(pid)]), what="the end of what was left")


def test_what_a_killed_test_process_had_started_ends_with_it(tmp_path: Path) -> None:
    text = """
import signal, subprocess
def test_it():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    Path({folder!r}, "pid").write_text(str(process.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    code, report, _ = run_suite(tmp_path, text.format(folder=str(tmp_path)))

    assert code != 0
    assert report["second_pass"] == "pytest ended with -9"
    eventually(lambda: not running([int((tmp_path / "pid").read_text())]), what="the end of what it had started")


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["here", "in other processes"])
def test_what_outlives_a_session_of_tests_reddens_the_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    text = """
import subprocess
from tests.gate import leftovers
@pytest.fixture(scope="session")
def kept():
    with leftovers.kept_for_the_session():
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    Path({folder!r}, "pid").write_text(str(process.pid))
    process.returncode = 0  # and it is never ended
def test_it(kept):
    pass
"""
    code, report, _ = run_suite(tmp_path, text.format(folder=str(tmp_path)), *options)

    pid = (tmp_path / "pid").read_text()
    assert (code, report["failures"], report["passed"]) == (1, [], 1)
    assert [stray.partition(" -c ")[0].rpartition(":")[0] for stray in report["strays"]] == [
        f"outlived its test process: pid {pid}"
    ]
    eventually(lambda: not running([int(pid)]), what="the end of what was left")


def test_a_test_process_that_dies_reddens_the_run_for_good(tmp_path: Path) -> None:
    text = """
def test_it():
    os.kill(os.getpid(), 9)
def test_other():
    pass
"""
    code, report, _ = run_suite(tmp_path, text, "-n", "1")

    assert code == 1
    assert report["second_pass"] in ("more than tests failed", "something went wrong that belongs to no test")
    assert any("test process gw0 ended" in stray for stray in report["strays"])


@pytest.mark.parametrize("text", ["", "def test_it():\n    pytest.skip('not here')\n", "os._exit(0)\n"])
def test_a_run_in_which_nothing_passes_is_red(tmp_path: Path, text: str) -> None:
    code, _, _ = run_suite(tmp_path, text)

    assert code != 0


def test_an_exception_in_a_thread_reddens_the_run_not_the_test(tmp_path: Path) -> None:
    text = """
def fail():
    raise ValueError("nobody hears this")
def test_it():
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
"""
    code, report, out = run_suite(tmp_path, text)

    assert (code, report["failures"], report["passed"]) == (1, [], 1)
    (stray,) = report["strays"]
    assert "ValueError: nobody hears this" in stray
    assert stray in out


def test_logs_of_what_a_failed_test_has_started_are_in_its_report(tmp_path: Path) -> None:
    text = """
from tests.support.fleet import keep_log
class Started:
    log_path = Path({folder!r}, "w1.log")
started = Started()
def test_it():
    Started.log_path.write_text("worker ready")
    keep_log(started)
    assert False
"""
    code, _, out = run_suite(tmp_path, text.format(folder=str(tmp_path)))

    assert code == 1
    assert "Captured log of w1.log" in out
    assert "worker ready" in (tmp_path / "s.xml").read_text()


# -- the list of known ones ---------------------------------------------------------------------------------------


def test_the_list_of_flaky_tests_is_short_and_young() -> None:
    known = tomllib.loads((ROOT / "tests" / "flaky.toml").read_text("utf-8"))["test"]

    assert len(known) <= MOST_KNOWN
    for one in known:
        assert set(one) == {"id", "date", "cause"}
        age = (datetime.now(UTC).date() - one["date"]).days
        assert age <= MOST_DAYS, f"{one['id']} is flaky since {age} days: mend it"


def test_few_are_forgiven() -> None:
    assert (suite.MOST_FAILED, suite.MOST_FLAKY, suite.ALONE) == (2, 3, 3)
