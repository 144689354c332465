"""Pages of records while others are submitted and removed."""

from __future__ import annotations

import base64
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


def test_a_cursor_of_somebody_who_may_not_see_all_names_no_other_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "_LOOKED_AT", 5)
    index: Any = Index({f"other{number:02}": 1000.5 + number for number in range(20)} | {"mine": 1000.0})
    found: list[str] = []
    cursor: str | None = None
    cursors: list[str] = []
    while len(cursors) < 20:
        more, cursor = paging.page(
            index, "tasks", cursor, 10, lambda ids: list(ids), lambda id: id == "mine", scoped=True
        )
        found += more
        if cursor is None:
            break
        cursors.append(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode())

    assert found == ["mine"]
    assert cursors
    assert "other" not in " ".join(cursors)
