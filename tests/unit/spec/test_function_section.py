"""The section `function`: names, arguments, what is split; what cannot be is refused, with a word on what to do."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.pipelines.resolve import lookup_of, task_specs
from gpuflow.routing.families import SPEC_OPTION, call_of
from gpuflow.spec import Stage, Template, canonical, parse
from gpuflow.spec.references import UnresolvedReference, parse_reference
from gpuflow.spec.sharding import shard


def function(name: Any = "my_team.jobs.embed", **fields: Any) -> dict[str, Any]:
    return {"taskType": "function", "function": {"name": name, **fields}}


def mistakes(spec: dict[str, Any], **stage: Any) -> str:
    with pytest.raises(InvalidTemplate) as refused:
        parse({"apiVersion": "gpuflow/v1", "spec": {"stages": [{"name": "a", "spec": spec, **stage}]}})
    return str(refused.value)


def test_both_forms_are_one() -> None:
    spec = canonical({"taskType": "function", "function": "my_team.jobs.embed"})

    assert spec == function() == canonical(spec)


@pytest.mark.parametrize(
    "name",
    [
        "os.system('x')", "my team.jobs", ".a", "a.", "a..b", "1a.b", "a-b.c", "ä.b", "a.b\n", "", "a." * 100 + "b",
        "${x.result.name}", "$${x}", "a.${x.result.y}", None, 3, ["a.b"],
    ],
)  # fmt: skip
def test_what_is_no_name_of_a_task_is_refused(name: Any) -> None:
    assert "spec.function" in mistakes(function(name))


@pytest.mark.parametrize("name", ["gpuflow.command", "celery.map", "tasks.supervised.run", "gpuflow", "celery"])
def test_tasks_of_gpuflow_and_celery_are_refused(name: str) -> None:
    told = mistakes(function(name))
    assert ("names below `tasks.`" if name.startswith("tasks.") else "a task of gpuflow or Celery itself") in told


@pytest.mark.parametrize("path", ["function", "function.name", "function.rows"])
def test_no_matrix_chooses_the_function(path: str) -> None:
    assert "a stage calls one function" in mistakes(function(), matrix={path: ["a.b", "c.d"]})


@pytest.mark.parametrize("name", ["$arguments", "self", "a b", "", "1", "x" * 201])
def test_names_of_arguments_are_identifiers(name: str) -> None:
    assert "is no name of an argument" in mistakes(function(kwargs={name: 1}))


def test_the_environment_is_read_by_the_function() -> None:
    assert "read os.environ there" in mistakes(function(args=[{"deep": ["${env:HOME}"]}]))
    assert "read os.environ there" in mistakes(
        function(kwargs={"x": 1}), matrix={"function.kwargs.x": [1, "${env:HOME}"]}
    )
    assert "set it in the environment of the workers" in mistakes(function(kwargs={"api_key": "abcdefgh01234567"}))


@pytest.mark.parametrize(
    ("fields", "parallel", "words"),
    [
        ({"kwargs": {"x": [1]}, "rows": "y"}, {"max_shards": 2}, "none of the arguments"),
        ({"kwargs": {"x": None}, "rows": "x"}, {"max_shards": 2}, "is null; it is to be split"),
        ({"args": [None], "rows": 0}, {"max_shards": 2}, "is null; it is to be split"),
        ({"args": [[1]], "rows": 1}, {"max_shards": 2}, "none of the arguments"),
        ({"args": [[1]], "rows": -1}, {"max_shards": 2}, "its place in args"),
        ({"kwargs": {"x": [1]}, "rows": ["x"]}, {"max_shards": 2}, "its place in args"),
        ({"args": [[1]], "rows": True}, {"max_shards": 2}, "its place in args"),
        ({"kwargs": {"x": "text"}, "rows": "x"}, {"max_shards": 2}, "it must be a list"),
        ({"kwargs": {"x": [1]}, "rows": "x"}, None, "splits nothing without parallel"),
        ({"kwargs": {"x": [1]}}, {"max_shards": 2}, "say which: function.rows"),
    ],
)
def test_what_is_split_is_a_list_among_the_arguments(fields: Any, parallel: Any, words: str) -> None:
    assert words in mistakes({**function(**fields), **({"parallel": parallel} if parallel else {})})


def test_a_matrix_varies_arguments_of_the_short_form_too() -> None:
    spec = {"taskType": "function", "function": "my_team.jobs.embed"}
    stages = [{"name": "a", "spec": spec, "matrix": {"function.kwargs.x": [1, 2]}}]
    stage = parse({"apiVersion": "gpuflow/v1", "spec": {"stages": stages}}).stage("a")

    assert [one["function"] for one in specs(stage, {})] == [function(kwargs={"x": x})["function"] for x in (1, 2)]
    assert "'data.items.x' leads nowhere" in mistakes(
        {"taskType": "echo", "data": {"items": [1]}}, matrix={"data.items.x": [1]}
    )


def test_a_list_is_split_in_order() -> None:
    named = canonical({**function(kwargs={"x": [1, 2, 3], "y": 0}, rows="x"), "parallel": {"max_shards": 2}})
    placed = canonical({**function(args=[0, [1, 2]], rows=1), "resources": {"accelerators": "cpu", "replicas": 9}})

    assert [one["function"]["kwargs"] for one in shard(named)] == [{"x": [1, 2], "y": 0}, {"x": [3], "y": 0}]
    assert [one["function"]["args"] for one in shard(placed)] == [[0, [1]], [0, [2]]]
    assert all("replicas" not in one["resources"] for one in shard(placed))
    assert [canonical(one) for one in shard(named)] == shard(named)


def test_the_call_of_a_function_has_its_arguments_as_they_are_meant() -> None:
    spec = canonical({**function(args=["$${env:HOME}"], kwargs={"x": {"y": None}}), "timeout": "2m", "priority": 0})

    name, args, kwargs, options = call_of(spec)

    assert (name, args, kwargs) == ("my_team.jobs.embed", ["${env:HOME}"], {"x": {"y": None}})
    assert options == {SPEC_OPTION: spec, "time_limit": 120, "priority": 0}
    with pytest.raises(UnresolvedReference):
        call_of({**spec, "function": {"name": "a.b", "args": ["${env:HOME}"]}})


def stages_of(*specs: dict[str, Any], **base: Any) -> Template:
    named = [{"name": name, "spec": spec} for name, spec in zip("abc", specs, strict=False)]
    return parse({"apiVersion": "gpuflow/v1", "spec": {**base, "stages": named}})


def test_a_base_gives_a_function_what_it_has_use_for_alone() -> None:
    echo = {"taskType": "echo", "echo": {"output": 1}}
    base = {"model": {"source": {"type": "preset", "identifier": "smollm2-135m-instruct"}}, "data": {"items": ["x"]}}

    template = stages_of(echo, function(), **base, timeout=5)

    assert template.stage("b").spec == {**function(), "timeout": 5}
    unused = stages_of(function(), **base).warnings
    assert [one.path for one in unused] == ["spec.model", "spec.data"]
    assert all(one.message.startswith("is not used: no stage is of ") for one in unused)
    with pytest.raises(InvalidTemplate, match="retry: null"):
        stages_of(function(), retry={"max_attempts": 2})
    assert "retry" not in stages_of({**function(), "retry": None}, retry={"max_attempts": 2}).stage("a").spec


def test_a_template_with_a_function_is_not_read_by_who_does_not_know_them() -> None:
    assert stages_of(function()).to_dict()["schema"] == 3
    assert stages_of({"taskType": "echo"}).to_dict()["schema"] == 1
    assert Template.from_dict(stages_of(function()).to_dict()) == stages_of(function())


def specs(stage: Stage, result: Any, functions: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    def load(value: Any) -> Any:
        return [1, 2, 3] if isinstance(value, dict) and "$artifact" in value else value

    return task_specs(stage, lambda name: result, load, functions)


def test_what_other_types_leave_by_reference_is_loaded_and_what_functions_return_is_passed_on() -> None:
    stage = stages_of({"taskType": "echo"}, function(args=["${a.result.items}", "${a.result}"])).stage("b")

    assert specs(stage, {"items": LARGE})[0]["function"]["args"] == [[1, 2, 3], {"items": [1, 2, 3]}]
    assert specs(stage, {"items": LARGE}, ("a",))[0]["function"]["args"] == [LARGE, {"items": LARGE}]


LARGE = {"$artifact": {"url": "file:///x", "sha256": "0" * 64, "bytes": 9}}


def test_what_several_tasks_leave_by_reference_is_loaded_too() -> None:
    paths = ["results.output", "results", "results[1]", "results[1].output"]
    args = [*("${a.result." + path + "}" for path in paths), "${a.result}"]
    stage = stages_of({"taskType": "echo"}, function(args=args)).stage("b")
    result = {"results": [{"output": LARGE, "n": {"deep": LARGE}}, {"output": "small", "n": 1}], "usage": {"n": 2}}
    whole = [{"output": [1, 2, 3], "n": {"deep": LARGE}}, {"output": "small", "n": 1}]

    (spec,) = specs(stage, result)

    given = spec["function"]["args"]
    assert given == [[[1, 2, 3], "small"], whole, whole[1], "small", {"results": whole, "usage": {"n": 2}}]
    (spec,) = specs(stage, result, ("a",))
    assert spec["function"]["args"][:2] == [[LARGE, "small"], result["results"]]


def no_json(value: Any) -> Any:
    assert not (isinstance(value, dict) and "$artifact" in value), "a file that is no JSON was opened"
    return value


def test_nobody_looks_into_what_a_function_returns() -> None:
    texts = {"taskType": "echo", "echo": {"message": "see ${a.result.value}", "output": "${a.result.value}"}}
    stage = stages_of(function(), texts).stage("b")

    (spec,) = task_specs(stage, lambda name: {"value": LARGE}, no_json, ("a",))

    assert spec["echo"]["output"] == LARGE and "file:///x" in spec["echo"]["message"]
    value = parse_reference("a.result.value")
    assert lookup_of(lambda name: {"value": LARGE}, no_json, ("a",))(value) == LARGE
    with pytest.raises(AssertionError, match="no JSON"):
        lookup_of(lambda name: {"value": LARGE}, no_json)(value)


def test_a_name_that_a_result_would_choose_is_refused_at_dispatch_too() -> None:
    stage = Stage(name="b", depends_on=("a",), spec=function("${a.result.name}"))

    with pytest.raises(InvalidTemplate):
        specs(stage, {"name": "gpuflow.command"})
    with pytest.raises(InvalidTemplate):
        specs(Stage(name="b", spec=function(kwargs="${a.result.all}")), {"all": {"$arguments": 1}})
    split = {**function(kwargs={"x": "${a.result.x}"}, rows="x"), "parallel": {"max_shards": 2}}
    with pytest.raises(InvalidTemplate, match="it must be a list"):
        specs(Stage(name="b", spec=split), {"x": "a ${text} that is none"})
