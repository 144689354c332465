"""The last lines of a run of the gate."""

from __future__ import annotations

from typing import Any

from tests.gate.report import MOST_LINES, Build, cause_of, end_of_run

GOOD = Build(name="tests", seconds=30.0, error="")


def suite(name: str = "unit", code: int = 0, passed: int = 10, **fields: Any) -> dict[str, Any]:
    one = {"name": name, "code": code, "seconds": 12.0, "passed": passed, "skipped": 0, "failures": [], "flaky": []}
    return {**one, "strays": [], "second_pass": "", **fields}


def failure(node_id: str = "t.py::test_a", **fields: Any) -> dict[str, Any]:
    one = {"node_id": node_id, "phase": "call", "seconds": 3.25, "error": "assert 1 == 2", "broken_promise": False}
    return {**one, "load": 1.5, **fields}


def step(*command: str, retcode: int = 0, output: str = "") -> dict[str, Any]:
    return {"command": ["/bin/python", *command], "retcode": retcode, "output": output, "err": ""}


def ran(*names: str) -> dict[str, Any]:
    return {"tests": {"test": [step("-m", "tests.gate.suite", name) for name in names]}}


def report(**given: Any) -> tuple[list[str], int]:
    usual: dict[str, Any] = {
        "builds": [GOOD],
        "environments": ran("unit"),
        "expected": ["tests"],
        "suites": [suite()],
        "left": [],
        "seconds": 100.0,
    }
    return end_of_run(**{**usual, **given})


def test_a_green_run_has_a_row_for_each_and_ends_like_pytest() -> None:
    lines, code = report(suites=[suite(), suite("chaos", passed=5)], environments=ran("unit", "chaos"))

    assert code == 0
    assert [line.split()[0] for line in lines[1:-2]] == ["suite", "build", "unit", "chaos"]
    assert lines[-1] == "========== 15 passed in 100.00s =========="


def test_a_failure_is_told_by_name_with_phase_seconds_and_error() -> None:
    failed = suite(code=1, failures=[failure(), failure(phase="teardown")], second_pass="a promise was broken")

    lines, code = report(suites=[failed])

    assert code == 1
    assert "FAILED t.py::test_a [call, 3.25 s] assert 1 == 2" in lines
    assert "  no second pass in unit: a promise was broken" in lines
    assert lines[-1] == "========== 1 failed, 10 passed in 100.00s =========="


def test_a_flaky_test_is_told_and_counts_as_passed() -> None:
    lines, code = report(suites=[suite(flaky=[failure()])])

    assert code == 0
    assert "FLAKY t.py::test_a [call, 3.25 s] assert 1 == 2 (load 1.5)" in lines
    assert "failed" not in lines[-1]


def test_a_build_that_failed_is_told_with_its_cause_and_is_red() -> None:
    failed = Build(name="ml", seconds=9.0, error="ERROR: No matching distribution found for torch")

    lines, code = report(builds=[GOOD, failed])

    assert code == 1
    assert "BUILD FAILED ml: ERROR: No matching distribution found for torch" in lines
    assert lines[-1].startswith("========== 1 failed, 10 passed")


def test_what_is_no_suite_is_told_by_its_command() -> None:
    lint = {"lint": {"test": [step("check", retcode=1, output="a.py:1:1: E501 Line too long\nFound 1 error.\n")]}}

    lines, code = report(environments={**ran("unit"), **lint}, expected=["lint", "tests"])

    assert code == 1
    assert "FAILED lint: python check: Found 1 error." in lines


def test_what_did_not_run_or_ended_without_a_report_is_red() -> None:
    lines, code = report(environments=ran("unit", "chaos"), expected=["tests", "ml"])

    assert code == 1
    assert "FAILED chaos: it ended without a report" in lines
    assert "FAILED ml: it did not run" in lines


def test_leftovers_and_stray_exceptions_are_red() -> None:
    lines, code = report(left=["pid 7: python"], suites=[suite(code=1, strays=["Exception in thread T"])])

    assert code == 1
    assert {"LEFT OVER pid 7: python", "STRAY in unit: Exception in thread T"} <= set(lines)


def test_a_suite_without_tests_is_red() -> None:
    lines, code = report(suites=[suite(code=5, passed=0)])

    assert code == 1
    assert "FAILED unit: pytest ended with 5" in lines


def test_it_fits_into_the_last_lines() -> None:
    many = [failure(f"t.py::test_{number}") for number in range(200)]

    lines, _ = report(suites=[suite(code=1, failures=many)])

    assert len(lines) <= MOST_LINES
    assert lines[-2].startswith("... and ")
    assert lines[-1] == "========== 200 failed, 10 passed in 100.00s =========="


def test_the_cause_of_a_build_is_the_last_line_that_speaks_of_an_error() -> None:
    log = "Collecting x\nERROR: Could not find a version\n  x==9\ntests: exit 1 (0.3 seconds)\ntests: FAIL code 1\n"

    assert cause_of(log) == "ERROR: Could not find a version"
    assert cause_of("only\nthis\n") == "this"
    assert cause_of("") == "it said nothing"
