"""The table of attacks names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(
    r"^\| (?!attack )(?P<attack>[^|]+) \| (?P<end>[^|]+) \| (?P<audited>[^|]+) \| `(?P<file>[^:`]+)::(?P<test>\w+)` \|$"
)


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return frozenset(one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_attack_has_a_test_that_is_there() -> None:
    lines = (ROOT / "docs" / "reference" / "attacks.md").read_text("utf-8").splitlines()
    rows = [found for line in lines if (found := ROW.match(line))]
    assert len(rows) == sum(line.startswith("| ") and not line.startswith("| attack") for line in lines)
    assert len(rows) >= 40
    assert [row["test"] for row in rows if row["test"] not in names_in(row["file"])] == []
