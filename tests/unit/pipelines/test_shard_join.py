"""The join of shards: it takes them for the whole only if they are; and what it makes of their results."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.pipelines.collect import shard_problem, stage_result, summed
from gpuflow.spec.sharding import shard_range


def shards(total: int = 10, count: int = 3, *, change: dict[str, Any] | None = None) -> list[TaskRecord]:
    """Return the records of shards that make up the whole; `change` is made to the result's `shard` of number 1."""
    found = []
    for index in range(count):
        start, end = shard_range(total, index, count)
        seen = {"index": index, "count": count, "start": start, "end": end, "total": total, "digest": "d"}
        found.append(record(index, count, {**seen, **((change or {}) if index == 1 else {})}, end - start))
    return found


def record(index: int, count: int, seen: Any, rows: int, task_type: str = "echo") -> TaskRecord:
    return TaskRecord(
        id=f"t{index}",
        state=TaskState.SUCCEEDED,
        task_type=task_type,
        spec={"data": {"shard": {"index": index, "count": count}}},
        result={"items": [{"index": number} for number in range(rows)], "shard": seen},
    )


@pytest.mark.parametrize(("total", "count"), [(10, 3), (2, 5), (1000, 3), (7, 1)])
def test_what_makes_up_the_whole_is_taken(total: int, count: int) -> None:
    assert shard_problem(shards(total, count)) is None
    assert shard_problem([*shards(total, count), *shards(total, count)]) is None  # two points of a matrix


def test_other_tasks_are_no_shards() -> None:
    plain = TaskRecord(id="p", state=TaskState.SUCCEEDED, spec={}, result={"shard": "a value of its own"})

    assert shard_problem([plain, plain]) is None
    assert shard_problem([]) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"total": 11}, "shard 0 saw 10 rows, shard 1 .* 11 rows"),
        ({"digest": "other"}, "the data changed between its shards.*other rows"),
        ({"start": 5}, "rows 5 to 7, which is not its share"),
        ({"index": 2}, "is not shard 1 of 3"),
        ({"total": None}, "does not say which rows"),
        ({"total": -4}, "does not say which rows"),
        ({"end": "7"}, "does not say which rows"),
    ],
)
def test_what_does_not_is_told(change: dict[str, Any], says: str) -> None:
    problem = shard_problem(shards(change=change))

    assert problem is not None
    assert re.search(says, problem)


def test_a_missing_shard_and_a_missing_item_are_told() -> None:
    whole = shards()
    short = record(1, 3, whole[1].result["shard"], 2)
    own = record(1, 3, whole[1].result["shard"], 2, task_type="acme.translate")

    assert shard_problem(whole[:2]) == "shard 2 of 3 is missing"
    assert "is not shard 1" in str(shard_problem([whole[0], whole[2]]))
    assert shard_problem([whole[0], short, whole[2]]) == "task t1 gave 2 items for its 3 rows (4 to 7)"
    assert shard_problem([whole[0], own, whole[2]]) is None


def test_all_numbers_of_usage_are_summed() -> None:
    usages = [
        {"tokens": 3, "seconds": 0.5, "detail": {"cached": 1}, "unit": "token", "exact": True},
        {"tokens": 4, "detail": {"cached": 2, "new": 5}, "unit": "token", "exact": False, "rows": None},
        {"seconds": 1.5},
    ]

    assert summed(usages) == {
        "tokens": 7,
        "seconds": 2.0,
        "detail": {"cached": 3, "new": 5},
        "unit": "token",
    }


def test_vectors_in_files_say_whose() -> None:
    results = [{"items": [{"index": 0, "embedding": {"file": "embeddings.npy", "row": 0}}]} for _ in range(2)]

    items = stage_result(results, lambda value: value)["items"]

    assert [(item["index"], item["embedding"]["row"], item["embedding"]["result"]) for item in items] == [
        (0, 0, 0),
        (1, 0, 1),
    ]
