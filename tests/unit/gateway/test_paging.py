"""Pages of records while others are submitted and removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gpuflow.gateway import paging


class Index:
    """A sorted set as Redis has it; `between` is called after each answer."""

    def __init__(self, entries: dict[str, float]) -> None:
        self.entries = entries
        self.between: Any = lambda: None

    def zrevrangebyscore(self, name: str, highest: str, lowest: str, *, start: int, num: int, withscores: bool) -> Any:
        below = [(id, score) for id, score in self.entries.items() if score <= float(highest)]
        below.sort(key=lambda one: (one[1], one[0].encode()), reverse=True)
        found = below[start : start + num]
        self.between()
        return found


def listed(index: Index, limit: int, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr(paging, "_CHUNK", 3)

    def read(ids: Sequence[str]) -> Sequence[str]:
        return ids

    pages, cursor = [], None
    while True:
        client: Any = index
        found, cursor = paging.page(client, "tasks", cursor, limit, read, lambda _: True)
        pages.append(found)
        if cursor is None:
            return pages


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize("times", [1, 2, 20], ids=["one time", "two times", "many times"])
def test_what_is_submitted_between_two_reads_repeats_and_hides_nothing(
    limit: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index({f"t{number:02}": 1000.5 + number % times for number in range(20)})
    before = set(index.entries)
    count = 0

    def submit() -> None:
        nonlocal count
        count += 1
        index.entries |= {f"new{count}-{number}": 2000.0 + count for number in range(2)}

    index.between = submit
    seen = [id for page in listed(index, limit, monkeypatch) for id in page]

    assert len(seen) == len(set(seen))
    assert before <= set(seen)
    order = [(index.entries[id], id) for id in seen]
    assert order == sorted(order, reverse=True)
