"""The table of what other systems offer: each test that it names is there, and each row says how or why not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in (ROOT / "docs" / "reference" / "seed-features.md").read_text("utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| feature |")
]


def exists(name: str) -> bool:
    file, _, test = name.partition("::")
    path = ROOT / file
    return path.is_file() and (not test or f"def {test}(" in path.read_text("utf-8"))


def test_each_feature_has_its_way_and_its_test_or_a_reason() -> None:
    assert len(ROWS) > 70
    lacking = [row[0] for row in ROWS if len(row) < 3 or not row[2]]
    assert lacking == [row[0] for row in ROWS if row[0].startswith("SSO")], "a row lacks its test"
    assert all(row[1].startswith("- ") for row in ROWS if len(row) < 3 or not row[2]), "no test, and no reason"


def test_the_tests_are_there() -> None:
    named = {name for row in ROWS if len(row) > 2 for name in re.findall(r"`(tests/[^`]+)`", row[2])}

    assert {name for name in named if not exists(name)} == set()


def test_no_row_is_written_twice() -> None:
    assert len({tuple(row[:2]) for row in ROWS}) == len(ROWS)
