"""Runs one suite of the gate: pytest, then those that failed once more, each alone, where that can hide nothing.

python -m tests.gate.suite NAME ARGUMENTS OF PYTEST

Writes NAME.json (`Suite`) and NAME.xml (JUnit) into GATE_DIR; tests/gate/report.py prints the end of a run from them.

The second pass takes place with CI=true only, and only after a suite whose whole fault is at most MOST_FAILED failed
tests that broke no promise: each is run alone, ALONE times, on a quiet machine. One that passes each time is FLAKY,
which is printed; MOST_FLAKY of a whole run are forgiven. A test that came to its time limit is not tried again: what it
waited for may have been lost. Nor is a clean-up that failed: it may be of other tests. Standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

MOST_FAILED: Final = 2
MOST_FLAKY: Final = 3
ALONE: Final = 3
#: How pytest-timeout says that a test came to its limit.
TIME_LIMIT: Final = "Failed: Timeout"
#: The machine is quiet when so much of its processors' time is idle, over a second.
QUIET_SHARE: Final = 0.6
QUIET_SECONDS: Final = float(os.environ.get("GATE_QUIET_SECONDS", "120"))


@dataclass(kw_only=True)
class Suite:
    """What came of a suite."""

    name: str
    code: int
    seconds: float
    passed: int = 0
    skipped: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    flaky: list[dict[str, Any]] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    #: Why the failures were not tried again.
    second_pass: str = ""


def main(arguments: list[str]) -> int:
    """Run the suite and return its exit code."""
    name, options = arguments[0], arguments[1:]
    folder = Path(os.environ.get("GATE_DIR") or Path.cwd() / ".tox" / "gate")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    code, told = _pytest([*options, f"--junitxml={folder / name}.xml"], folder / f"{name}.run.json")
    suite = Suite(name=name, code=code, seconds=0.0, passed=told.get("passed", 0), skipped=told.get("skipped", 0),
                  failures=told.get("failures", []), strays=told.get("strays", []))  # fmt: skip
    if not code and (told.get("collected") != told.get("reported") or not suite.passed):
        suite.code = 1
        suite.second_pass = f"pytest ended well, and {suite.passed} tests passed of {told.get('collected')}"
    elif code:
        suite.second_pass = why_not_again(code, told, _flaky_before(folder, name))
        if not suite.second_pass and os.environ.get("CI") != "true":
            suite.second_pass = "only with CI=true"
        if not suite.second_pass:
            limits = [option for option in options if option.startswith("--timeout=")]
            _second_pass(suite, folder, limits)
    suite.seconds = round(time.monotonic() - began, 1)
    (folder / f"{name}.json").write_text(json.dumps(asdict(suite), indent=1))
    return suite.code


def why_not_again(code: int, told: dict[str, Any], flaky_before: int) -> str:
    """Return why the failures of a run may not be tried again; empty if they may. Pure."""
    failures = told.get("failures", [])
    failed = {one["node_id"] for one in failures}
    if code != 1 or not told:
        return f"pytest ended with {code}"
    if told["collected"] != told["reported"]:
        return f"{told['collected']} tests were collected, {told['reported']} reported"
    if any(one["phase"] not in ("setup", "call") for one in failures) or not failed:
        return "more than tests failed"
    if any(one["error"].startswith(TIME_LIMIT) for one in failures):
        return "a test came to its time limit"
    if told["strays"]:
        return "something went wrong that belongs to no test"
    if any(one["broken_promise"] for one in failures):
        return "a promise was broken"
    if len(failed) > MOST_FAILED:
        return f"{len(failed)} tests failed, more than {MOST_FAILED}"
    if flaky_before + len(failed) > MOST_FLAKY:
        return f"more than {MOST_FLAKY} tests of this run would be flaky"
    return ""


def _second_pass(suite: Suite, folder: Path, limits: list[str]) -> None:
    for node_id in dict.fromkeys(one["node_id"] for one in suite.failures):
        for number in range(1, ALONE + 1):
            _wait_until_quiet()
            code, told = _pytest([node_id, "-n", "0", *limits], folder / f"{suite.name}.alone.json")
            if code or told.get("passed") != 1:
                suite.second_pass = f"{node_id} failed again, alone, at try {number}"
                return
    suite.flaky, suite.failures = suite.failures, []
    suite.passed += len({one["node_id"] for one in suite.flaky})
    suite.code = 0


def _pytest(options: list[str], report: Path) -> tuple[int, dict[str, Any]]:
    """Run pytest; return its exit code and what the plugin told. Not as a module: that would test the checkout."""
    report.unlink(missing_ok=True)
    program = Path(sys.executable).with_name("pytest")
    done = subprocess.run([program, *options], env={**os.environ, "GATE_REPORT": str(report)}, check=False)
    return done.returncode, json.loads(report.read_text()) if report.exists() else {}


def _flaky_before(folder: Path, name: str) -> int:
    others = [path for path in folder.glob("*.json") if path.name.count(".") == 1 and path.stem != name]
    return sum(len({one["node_id"] for one in json.loads(path.read_text())["flaky"]}) for path in others)


def _wait_until_quiet() -> None:
    deadline = time.monotonic() + QUIET_SECONDS
    while _idle_share(1.0) < QUIET_SHARE and time.monotonic() < deadline:
        pass


def _idle_share(seconds: float) -> float:
    """Return how much of all processors' time was idle in the next `seconds` (proc(5), /proc/stat)."""
    if not Path("/proc/stat").exists():
        return 1.0

    def read() -> list[int]:
        return [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]

    before = read()
    time.sleep(seconds)
    spent = [now - then for now, then in zip(read(), before, strict=True)]
    return (spent[3] + spent[4]) / max(1, sum(spent))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
