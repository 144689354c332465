"""A run that asks for a marker imports the files that name it, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gate import selection

ROOT = Path(__file__).resolve().parents[3]
#: The suites that ask for a marker (tox.ini).
ASKED = ("alone", "long", "ml")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("ml and not long", ["ml"]),
        ("alone and not ml and not long", ["alone"]),
        ("ml and alone", ["ml", "alone"]),
        ("not ml and not long", []),
        ("ml or alone", []),
        ("ml and (alone or long)", []),
        ("not (ml and alone)", []),
        ("ml and not (alone and long)", []),
        ("", []),
    ],
)
def test_what_each_test_of_a_run_has(expression: str, expected: list[str]) -> None:
    assert selection.required(expression) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pytestmark = pytest.mark.ml", True),
        ("pytestmark = [pytest.mark.ml, pytest.mark.timeout(9)]", True),
        ("marks = [pytest.mark.ml] if needs_ml else []", True),
        ("pytestmark = pytest.mark.mlx", False),
        ("def test_html(): ...", False),
    ],
)
def test_a_file_that_names_the_marker_may_have_such_tests(text: str, expected: bool) -> None:
    assert selection.may_have(text, ["ml"]) is expected


def test_files_that_are_left_out_are_not_imported(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    from tests.gate.plugin import pytest_ignore_collect

    named, other, helper = (tmp_path / name for name in ("test_named.py", "test_other.py", "conftest.py"))
    named.write_text("import pytest\npytestmark = pytest.mark.ml\n")
    for path in (other, helper):
        path.write_text("raise RuntimeError\n")
    asked = pytestconfig.option.markexpr
    try:
        pytestconfig.option.markexpr = "ml and not long"
        left_out = [path.name for path in (named, other, helper, tmp_path) if pytest_ignore_collect(path, pytestconfig)]
        pytestconfig.option.markexpr = "not ml"
        assert not any(pytest_ignore_collect(path, pytestconfig) for path in (named, other))
    finally:
        pytestconfig.option.markexpr = asked
    assert left_out == ["test_other.py"]


def test_markers_that_a_suite_asks_for_are_given_in_test_files_alone() -> None:
    """A conftest or a helper that gave one to the tests of other files would take them out of every suite."""
    given = re.compile(rf"\bmark\.(?:{'|'.join(ASKED)})\b|add_marker")
    files = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]

    assert len(files) > 100
    assert [str(path.relative_to(ROOT)) for path in files if given.search(path.read_text("utf-8"))] == []
