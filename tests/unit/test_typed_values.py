"""Values that Celery's JSON writes with a type: each is read for itself, also beside one that only looks like one."""

from __future__ import annotations

from datetime import date
from typing import Any

from gpuflow.functions.calls import given_or_plain

DAY: dict[str, Any] = {"__type__": "date", "__value__": "2026-03-01"}


def test_what_is_no_type_leaves_the_others_what_they_are() -> None:
    odd = {"__type__": "nobody's", "__value__": [1]}

    assert given_or_plain([DAY, {"in": odd}, {"__type__": [], "__value__": DAY}]) == [
        date(2026, 3, 1),
        {"in": odd},
        {"__type__": [], "__value__": date(2026, 3, 1)},
    ]


def test_what_nests_too_deeply_stays_plain() -> None:
    deep: Any = {"__type__": "nobody's", "__value__": 1}
    for _ in range(950):
        deep = [deep]

    assert given_or_plain(deep) is deep
