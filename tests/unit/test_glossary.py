"""The glossary: one name for each concept, and the names that it reports of the code are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split("|")]
    for line in (ROOT / "docs" / "glossary.md").read_text("utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| name |")
]


@cache
def code() -> str:
    folders = (ROOT / "gpuflow", ROOT / "executors")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".lua")]
    return "\n".join([*(str(path.relative_to(ROOT)) for path in files), *(path.read_text("utf-8") for path in files)])


def test_every_row_has_a_name_a_meaning_and_an_identifier() -> None:
    assert ROWS
    assert [row for row in ROWS if len(row) != 4 or not row[0] or not row[1] or not row[3]] == []


def test_no_concept_has_two_names_and_no_name_two_concepts() -> None:
    names = [row[0] for row in ROWS]

    assert sorted(names) == sorted(set(names))


def test_the_identifiers_are_in_the_code() -> None:
    identifiers = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[3])}

    assert {name for name in identifiers if not re.search(rf"\b{re.escape(name)}", code())} == set()
