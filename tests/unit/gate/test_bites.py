"""The bites fit the product and its tests, and what is no bite is told."""

from __future__ import annotations

import pytest

from tests.gate.bites import BITES, ROOT, Bite, OutOfDate, Red, Row, fault_of, mutate, table
from tests.gate.suite import ALONE

BITE = Bite(name="b", file="f.py", old="one", new="two", tests=("tests/unit/test_a.py",))


def red(passed_alone: int = 0, broken_promise: bool = False) -> Red:
    return Red("t.py::test_a", "assert 0", broken_promise, passed_alone)


@pytest.mark.parametrize("bite", BITES, ids=lambda bite: bite.name)
def test_a_bite_changes_its_file_and_names_tests_that_exist(bite: Bite) -> None:
    text = (ROOT / bite.file).read_text()

    assert mutate(bite, text) != text
    for test in bite.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0] or 'test_'}" in (ROOT / file).read_text(), test


def test_each_bite_has_a_name_of_its_own() -> None:
    assert len({bite.name for bite in BITES}) == len(BITES)


@pytest.mark.parametrize("text", ["", "one one"])
def test_a_text_that_is_not_there_exactly_once_is_an_error(text: str) -> None:
    with pytest.raises(OutOfDate, match="update the bite"):
        mutate(BITE, text)


@pytest.mark.parametrize(
    ("promise", "code", "failed", "fault"),
    [
        (False, 1, [red()], ""),
        (False, 1, [red(ALONE - 1)], ""),
        (False, 1, [red(ALONE), red()], ""),
        (False, 1, [red(ALONE, broken_promise=True)], ""),
        (True, 1, [red(broken_promise=True)], ""),
        (True, 1, [red()], "no test raised BrokenPromise"),
        (False, 1, [red(ALONE)], "forgiven"),
        (False, 0, [], "not caught: pytest ended with 0"),
        (False, 2, [], "not caught: pytest ended with 2"),
        (False, 1, [], "not caught: pytest ended with 1"),
    ],
)
def test_what_is_wrong_with_a_bite(promise: bool, code: int, failed: list[Red], fault: str) -> None:
    bite = Bite(name="b", file="f.py", old="one", new="two", tests=(), broken_promise=promise)

    assert fault_of(bite, code, failed) == fault


def test_the_table_has_a_line_for_each_bite_and_its_failed_tests() -> None:
    lines = table([Row(BITE, 2, [red(1)], "forgiven")]).splitlines()

    assert lines[1].split() == ["b", "f.py", "unit", "2", "passed", "1", "failed", "FORGIVEN"]
    assert lines[2].split() == ["red", "alone", str(ALONE - 1), "of", str(ALONE), "t.py::test_a"]
