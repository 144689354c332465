"""The part of its data that a child takes: real children, every kind of source, and the rows as one task reads them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.base import ExecutorError
from executors.data.shards import digest_of, take_shard
from executors.data.sources import read_entries
from gpuflow.protocol import Emitter, Request
from tests.fixtures.executor_child import Ended


def taken(data: dict[str, Any], index: int, count: int) -> tuple[list[Any], Any]:
    spec = {"data": {**data, "shard": {"index": index, "count": count}}}
    request = Request(task_id="t", task_type="echo", spec=spec, output_dir="/nowhere")
    cut, shard = take_shard(request, Emitter(io.StringIO()))
    assert "shard" not in cut.spec["data"]
    kind = cut.spec["data"]["type"]
    return cut.spec["data"]["items" if kind == "list" else kind], shard


@given(
    st.lists(st.text(min_size=1), min_size=1, max_size=30),
    st.integers(1, 40),
    st.sampled_from(["list", "prompts", "preferences"]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_the_parts_make_up_what_one_task_reads(
    rows: list[str], count: int, kind: str, shuffle: bool, most: int | None
) -> None:
    data: dict[str, Any] = {"type": kind, ("items" if kind == "list" else kind): rows, "shuffle": shuffle}
    data |= {"max_items": most} if most else {}
    whole = read_entries(data, None, Emitter(io.StringIO()))

    parts = [taken(data, index, count) for index in range(count)]

    assert [row for part, _ in parts for row in part] == whole
    assert {(shard.total, shard.digest, shard.count) for _, shard in parts} == {(len(whole), digest_of(whole), count)}


def test_a_child_returns_the_rows_of_its_part(echo: Callable[..., Ended], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": str(number), "a": "x"}) + "\n" for number in range(7)))
    data = {"type": "jsonl", "path": str(file), "columns": {"prompt": "q", "completion": "a"}, "max_items": 5}

    ended = echo({}, spec={"data": {**data, "shard": {"index": 1, "count": 2}}})

    assert [item["output"]["prompt"] for item in ended.result["items"]] == ["3", "4"]
    assert ended.result["usage"] == {"items": 2}
    said = ended.result["shard"]
    assert {**said, "digest": ""} == {"index": 1, "count": 2, "start": 3, "end": 5, "total": 5, "digest": ""}
    assert "shard 1 of 2: rows 3 to 5 of 5" in [one["message"] for one in ended.named("log")]


def test_an_empty_part_runs_nothing(echo: Callable[..., Ended], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": 1}\n')

    ended = echo(
        {"fail": "it ran"}, spec={"data": {"path": str(file), "type": "jsonl", "shard": {"index": 1, "count": 2}}}
    )

    assert ended.result["items"] == []
    assert (ended.result["shard"]["start"], ended.result["shard"]["end"]) == (1, 1)
    assert json.loads((tmp_path / "out" / "responses.json").read_text()) == {"items": []}


def test_data_without_rows_and_rows_that_are_not_those_of_the_dispatch_fail(
    echo: Callable[..., Ended], tmp_path: Path
) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    none = {"type": "jsonl", "path": str(tmp_path / "none.jsonl"), "shard": {"index": 0, "count": 2}}
    wrong = {"type": "list", "items": ["a"], "shard": {"index": 0, "count": 2, "start": 0, "end": 2, "total": 4}}

    assert echo({}, spec={"data": none}).error["type"] == "BadInput"
    assert echo({}, spec={"data": wrong}).error["type"] == "ShardMismatch"


def test_a_shard_is_not_merged_with_other_calls(echo: Callable[..., Ended]) -> None:
    shard = {"index": 0, "count": 2}
    children = [
        {"id": "a", "spec": {"data": {"items": ["x"], "shard": shard}}},
        {"id": "b", "spec": {"data": {"items": ["y"]}}},
    ]

    result = echo({}, spec={"merge_children": children}).result["children"]

    assert result["a"]["error"]["type"] == "BadInput"
    assert result["b"]["items"][0]["output"] == "y"


def test_the_digest_is_that_of_the_rows() -> None:
    class Picture:
        pass

    rows = [{"b": 1, "a": datetime(2026, 1, 1, tzinfo=UTC)}, {"picture": Picture(), "bytes": b"x"}]
    same = [{"a": datetime(2026, 1, 1, tzinfo=UTC), "b": 1}, {"picture": Picture(), "bytes": b"x"}]

    assert digest_of(rows) == digest_of(same)
    assert digest_of(rows) != digest_of(rows[::-1])
    assert digest_of(["ab"]) != digest_of(["a", "b"])
    assert digest_of([{"bytes": b"x"}]) != digest_of([{"bytes": b"y"}])
    with pytest.raises(ExecutorError, match="cannot be read here"):
        taken({"type": "graph_template"}, 0, 2)
