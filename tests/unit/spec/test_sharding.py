"""Splitting rows over several tasks: the ranges tile the whole for every total and count, and nothing else splits."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.data.sources import read_entries
from gpuflow.errors import InvalidTemplate
from gpuflow.protocol import Emitter
from gpuflow.spec import canonical, parse, shard, shard_count
from gpuflow.spec.sharding import shard_range

MODEL = {"source": {"identifier": "m"}}
THREE = {"parallel": {"enabled": True, "max_shards": 3}}


@given(st.integers(0, 10**12), st.integers(1, 1024))
def test_ranges_tile_the_whole(total: int, count: int) -> None:
    ranges = [shard_range(total, index, count) for index in range(count)]

    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
    sizes = {end - start for start, end in ranges}
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("total", "index", "count"), [(-1, 0, 1), (5, 3, 3), (5, -1, 3), (5, 0, 0)])
def test_a_shard_that_does_not_exist_is_refused(total: int, index: int, count: int) -> None:
    with pytest.raises(ValueError, match="there is no shard"):
        shard_range(total, index, count)


@given(
    st.lists(st.integers(), min_size=1, max_size=60),
    st.integers(2, 70),
    st.sampled_from(["items", "prompts"]),
    st.one_of(st.none(), st.integers(1, 70)),
    st.booleans(),
    st.integers(0, 9),
)
def test_inline_shards_joined_are_what_one_task_would_read(
    values: list[int], count: int, field: str, most: int | None, shuffle: bool, seed: int
) -> None:
    data = {field: values, "type": "list" if field == "items" else "prompts", "shuffle": shuffle, "seed": seed}
    data |= {"max_items": most} if most else {}
    whole = read_entries(data, None, Emitter(io.StringIO()))

    parts = shard({"taskType": "echo", "data": data}, count)

    assert [value for part in parts for value in part["data"][field]] == whole
    assert len(parts) == min(count, len(whole))
    if len(parts) > 1:
        for index, part in enumerate(parts):
            start, end = shard_range(len(whole), index, len(parts))
            said = {"index": index, "count": len(parts), "start": start, "end": end, "total": len(whole)}
            assert part["data"]["shard"] == said
            assert {**part, "data": None} == {"taskType": "echo", "data": None}
            assert canonical({"taskType": "echo", "data": {field: ["x"], "shard": said}})["data"]["shard"] == said


@pytest.mark.parametrize(
    "data",
    [
        {"type": "dataset", "url": "a/b"},
        {"type": "jsonl", "path": "/data/rows.jsonl", "max_items": 7},
        {"type": "preset", "name": "chatterbot-english"},
        {"type": "list", "messages": [[{"role": "user", "content": "hi"}]]},
    ],
)
def test_rows_that_are_read_by_the_child_are_cut_there(data: dict[str, Any]) -> None:
    parts = shard({"taskType": "echo", "data": data, **THREE})

    assert parts == [
        {"taskType": "echo", "data": {**data, "shard": {"index": index, "count": 3}}} for index in range(3)
    ]


def test_one_part_is_the_task_itself() -> None:
    assert shard({"taskType": "echo", "data": {"items": ["a"]}, **THREE}) == [
        {"taskType": "echo", "data": {"items": ["a"]}}
    ]
    assert shard({"taskType": "echo", "resources": {"replicas": 1, "labels": {"a": "b"}}}) == [
        {"taskType": "echo", "resources": {"labels": {"a": "b"}}}
    ]
    with pytest.raises(ValueError, match="at least 1"):
        shard({}, 0)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 1),
        (THREE, 3),
        ({"parallel": {"max_shards": 4}}, 4),
        ({"parallel": {"enabled": False, "max_shards": 4}}, 1),
        ({"resources": {"replicas": 5}}, 5),
        ({"resources": {"replicas": 1}, **THREE}, 3),
        ({"resources": {"replicas": 5}, "parallel": {"enabled": True}}, 5),
    ],
)
def test_what_a_template_asks_for(fields: dict[str, Any], count: int) -> None:
    template = parse({"taskType": "echo", "data": {"items": list("abcdefgh")}, **fields})

    assert shard_count(template.stages[0].spec) == count
    assert template.stages[0].is_split is (count > 1)


@pytest.mark.parametrize(
    ("spec", "path", "says"),
    [
        ({"taskType": "sft", "model": MODEL, "data": {"url": "a/b"}, **THREE}, "parallel", "trains one model"),
        (
            {"taskType": "lora_sft", "model": MODEL, "data": {"url": "a/b"}, "resources": {"replicas": 2}},
            "resources.replicas",
            "trains one model",
        ),
        ({"taskType": "command", "command": "true", **THREE}, "parallel", "give the stage a matrix"),
        ({"taskType": "command", "command": "true", "resources": {"replicas": 2}}, "resources.replicas", "matrix"),
        ({"taskType": "echo", **THREE}, "parallel", "the task has no data"),
        (
            {"taskType": "echo", "data": {"items": ["a"]}, "parallel": {"enabled": True}},
            "parallel.max_shards",
            "number",
        ),
        (
            {"taskType": "echo", "data": {"items": ["a"]}, "resources": {"replicas": 2}, **THREE},
            "resources.replicas",
            "max_shards is 3",
        ),
        (
            {
                "taskType": "echo",
                "data": {"items": ["a"]},
                "resources": {"replicas": 2},
                "parallel": {"enabled": False},
            },
            "resources.replicas",
            "enabled is false",
        ),
        ({"taskType": "echo", "data": {"items": ["a"], "shard": {"index": 0, "count": 2}}}, "data.shard", "parallel"),
    ],
)
def test_what_cannot_be_split_is_refused(spec: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(InvalidTemplate) as caught:
        parse(spec)

    assert [one.path for one in caught.value.mistakes] == [path]
    assert says in caught.value.mistakes[0].message


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"index": 2, "count": 2}, "counted from 0"),
        ({"index": 0, "count": 2, "start": 0}, "some of start, end and total"),
        ({"index": 0, "count": 2, "start": 0, "end": 3, "total": 4}, "another range"),
        ({"index": 0}, "count"),
    ],
)
def test_a_wrong_shard_is_refused_at_dispatch(part: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidTemplate, match=says):
        canonical({"taskType": "echo", "data": {"items": ["a"], "shard": part}})


def test_a_public_template_is_warned_where_nothing_changes() -> None:
    spec = {"taskType": "echo", "data": {"items": ["a"]}}

    one = parse({"apiVersion": "mloc/v1", "spec": {**spec, "parallel": {"enabled": True}}})
    two = parse({"apiVersion": "mloc/v1", "spec": {**spec, "resources": {"replicas": 2}, **THREE}})

    assert [warning.path for warning in one.warnings] == ["spec.parallel.max_shards"]
    assert [warning.path for warning in two.warnings] == ["spec.resources.replicas"]
    assert shard_count(two.stages[0].spec) == 3
