"""The specs of a stage when the stages before it have given references: loaded only where somebody looks inside."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.pipelines.collect import stage_result
from gpuflow.pipelines.resolve import task_specs
from gpuflow.spec import parse
from gpuflow.spec.artifact_reference import is_reference, read_reference
from gpuflow.spec.references import UnresolvedReference

ITEMS = [{"index": number, "output": f"answer {number}"} for number in range(10)]


def reference(count: int | None = 10) -> dict[str, Any]:
    inside = {"url": "s3://bucket/items.json", "sha256": "a" * 64, "bytes": 999}
    return {"$artifact": inside | ({} if count is None else {"count": count})}


class Loader:
    """Gives ITEMS for every reference, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: Any) -> Any:
        if not is_reference(value):
            return value
        self.calls += 1
        return ITEMS


def specs(spec: dict[str, Any], loader: Loader, given: Any = None, **stage: Any) -> list[dict[str, Any]]:
    nodes = [{"name": "a", "spec": {}}, {"name": "b", "spec": spec, **stage}]
    template = parse({"taskType": "echo", "stages": nodes})
    result = {"items": reference(), "n": 3} if given is None else given
    return task_specs(template.stage("b"), lambda name: result, loader)


def test_a_whole_reference_is_passed_on_unloaded() -> None:
    loader = Loader()

    (spec,) = specs({"data": {"items": "${a.result.items}"}, "echo": {"output": "${a.result.items}"}}, loader)

    assert spec["data"]["items"] == spec["echo"]["output"] == reference()
    assert loader.calls == 0


def test_a_path_that_leads_through_a_reference_loads_it() -> None:
    (spec,) = specs({"echo": {"output": "${a.result.items[2].output}", "message": "${a.result.n}"}}, Loader())

    assert spec["echo"] == {"output": "answer 2", "message": 3}


def test_a_path_leads_through_a_reference_of_each_of_several_tasks() -> None:
    loader = Loader()
    given = {"results": [{"output": reference()}, {"output": reference()}], "made": [{"by": {"a": reference()}}]}
    echo = {"output": "${a.result.results.output[0][2].output}", "message": "${a.result.made.by.a[0][1].output}"}

    (spec,) = specs({"echo": echo}, loader, given)

    assert spec["echo"] == {"output": "answer 2", "message": "answer 1"}
    assert loader.calls == 2, "the second one is not looked into"


def test_text_around_a_reference_has_its_value() -> None:
    (spec,) = specs({"echo": {"output": "all: ${a.result.items}"}}, Loader())

    assert "answer 9" in spec["echo"]["output"]
    assert "$artifact" not in spec["echo"]["output"]


def test_a_graph_template_is_made_of_the_values() -> None:
    columns = [{"label": "Draft", "node": "a", "path": "result.items"}]

    (spec,) = specs({"data": {"type": "graph_template", "template": {"columns": columns}}}, Loader())

    assert spec["data"]["items"][1] == "Draft:\nanswer 1"


def test_a_missing_step_behind_a_reference_is_named() -> None:
    with pytest.raises(UnresolvedReference, match=r"items has 10 entries, so there is no \[10\]"):
        specs({"echo": {"output": "${a.result.items[10].output}"}}, Loader())


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, [(0, 4), (4, 7), (7, 10)]),
        ({"max_items": 2}, [(0, 1), (1, 2)]),
        ({"max_items": 99}, [(0, 4), (4, 7), (7, 10)]),
    ],
)
def test_shards_are_parts_of_the_reference(fields: dict[str, Any], parts: list[tuple[int, int]]) -> None:
    loader = Loader()
    data = {"items": "${a.result.items}", **fields}

    found = specs({"data": data, "parallel": {"enabled": True, "max_shards": 3}}, loader)

    assert [read_reference(spec["data"]["items"]).slice for spec in found] == parts
    assert not any("max_items" in spec["data"] for spec in found)
    assert loader.calls == 0


@pytest.mark.parametrize(
    ("count", "fields", "seed"), [(None, {}, None), (10, {"shuffle": True}, 0), (10, {"shuffle": True, "seed": 7}, 7)]
)
def test_what_is_not_known_at_dispatch_is_cut_by_the_child(
    count: int | None, fields: dict[str, Any], seed: int | None
) -> None:
    given, loader = {"items": reference(count)}, Loader()
    spec = {"data": {"items": "${a.result.items}", **fields}, "parallel": {"enabled": True, "max_shards": 3}}

    found = specs(spec, loader, given)

    assert [one["data"]["shard"] for one in found] == [{"index": index, "count": 3} for index in range(3)]
    assert all(one["data"]["items"] == given["items"] for one in found)
    assert [one["data"].get("seed") for one in found] == [seed] * 3
    assert not any("parallel" in one for one in found)
    assert loader.calls == 0


def test_a_matrix_of_shards_has_its_limit() -> None:
    spec = {"data": {"path": "/rows.jsonl"}, "parallel": {"max_shards": 1024}}
    matrix = {"priority": [1, 2, 3, 4]}

    assert len(specs(spec, Loader(), matrix=matrix)) == 4096
    with pytest.raises(InvalidTemplate, match=r"stage 'b' makes more than 4096 tasks"):
        specs(spec, Loader(), matrix={"priority": [1, 2, 3, 4, 5]})


def test_items_of_several_tasks_are_joined_from_references() -> None:
    loader = Loader()
    results = [{"items": reference(), "usage": {"n": 1}}, {"items": ITEMS[:1], "usage": {"n": 2}}]

    joined = stage_result(results, loader)

    assert [item["index"] for item in joined["items"]] == list(range(11))
    assert joined["usage"] == {"n": 3}
    assert stage_result(results[:1], loader)["items"] == reference()


def test_what_any_task_tells_is_told_of_the_stage():
    results = [{"items": [1], "warnings": ["a", "b"]}, {"items": [2], "warnings": ["b"], "missing_artifacts": ["x"]}]
    joined = stage_result(results, lambda value: value)
    assert (joined["warnings"], joined["missing_artifacts"]) == (["a", "b"], ["x"])
    assert "warnings" not in stage_result([{"items": [1]}, {"items": [2]}], lambda value: value)
