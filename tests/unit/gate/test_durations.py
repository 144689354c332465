"""The long test files begin first."""

from __future__ import annotations

from pathlib import Path

from tests.gate import durations

ROOT = Path(__file__).resolve().parents[3]


def test_the_longest_come_first_and_the_others_stay_as_they_came() -> None:
    places = durations.longest_first(
        ["b.py", "a.py", "b.py", "long.py", "longest.py"], {"long.py": 9, "longest.py": 90}
    )

    assert places == {"longest.py": 0, "long.py": 1, "b.py": 2, "a.py": 3}


def test_the_seconds_of_a_file_are_those_of_its_tests(tmp_path: Path) -> None:
    report = tmp_path / "ml.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.e2e.test_a" name="one" time="4.2"/>'
        '<testcase classname="tests.e2e.test_a" name="two" time="3.1"/>'
        '<testcase classname="tests.unit.test_b" name="one" time="0.1"/></testsuite></testsuites>'
    )

    assert durations.measured([report]) == {"tests/e2e/test_a.py": 7}


def test_every_named_file_is_there() -> None:
    known = durations.read()

    assert known, "no file is named; tests/gate/durations.py says how to measure them"
    assert [path for path in known if not (ROOT / path).is_file()] == []
