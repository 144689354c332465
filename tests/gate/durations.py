"""How long each test file takes, so that the long ones begin first: the last file to begin decides when a suite ends.

python -m tests.gate.durations NAME.xml ... writes tests/gate/durations.json from the JUnit reports of suites that
share their files among processes (GATE_DIR has them after a run). Files that it does not name count as short.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).with_suffix(".json")
#: A file is named from so many seconds on.
LEAST_SECONDS: Final = 5


def read() -> dict[str, int]:
    """Return the seconds of each file that is named."""
    known: dict[str, int] = json.loads(FILE.read_text("utf-8"))
    return known


def longest_first(paths: Iterable[str], known: dict[str, int]) -> dict[str, int]:
    """Return each path's place: the longest first, those of no known length behind them as they came. Pure."""
    given = list(dict.fromkeys(paths))
    return {path: place for place, path in enumerate(sorted(given, key=lambda path: -known.get(path, 0)))}


def measured(reports: Iterable[Path]) -> dict[str, int]:
    """Return the seconds of each file that took long enough, by what JUnit reports say of its tests."""
    total: Counter[str] = Counter()
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            total[case.get("classname", "").replace(".", "/") + ".py"] += float(case.get("time", "0"))
    return {path: round(seconds) for path, seconds in sorted(total.items()) if seconds >= LEAST_SECONDS}


if __name__ == "__main__":
    FILE.write_text(json.dumps({**read(), **measured(map(Path, sys.argv[1:]))}, indent=1, sort_keys=True) + "\n")
