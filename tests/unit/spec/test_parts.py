"""The pure parts: deep merge, graph order, matrix, presets, and that importing stays light."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.errors import GPUFlowError
from gpuflow.spec import configs_root, expand_matrix, list_presets, load_preset, parse, set_path
from gpuflow.spec.graph import find_cycle, topological, upstream
from gpuflow.spec.overlay import deep_merge
from gpuflow.spec.presets import KINDS
from tests.support.waiting import patient

TREES = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=12,
)
MAPPINGS = st.dictionaries(st.sampled_from("abcd"), TREES, max_size=4)


@given(MAPPINGS)
def test_merging_nothing_changes_nothing(base):
    assert deep_merge(base, {}) == base
    assert deep_merge({}, base) == base
    assert deep_merge(base, base) == base


@given(MAPPINGS, MAPPINGS, MAPPINGS)
def test_merging_is_associative_when_mappings_stay_mappings(one, two, three):
    flat = [{key: {"v": str(value)} for key, value in tree.items()} for tree in (one, two, three)]

    assert deep_merge(deep_merge(flat[0], flat[1]), flat[2]) == deep_merge(flat[0], deep_merge(flat[1], flat[2]))


@given(MAPPINGS, MAPPINGS)
def test_merging_leaves_both_as_they_were_and_the_upper_wins(base, over):
    before = copy.deepcopy((base, over))
    merged = deep_merge(base, over)

    assert (base, over) == before
    assert set(merged) == {*base, *over}
    assert all(merged[key] == value for key, value in over.items() if not isinstance(value, dict))


def test_another_type_of_data_does_not_inherit_fields():
    base = {
        "data": {"type": "dataset", "url": "a/b", "seed": 1},
        "model": {"source": {"type": "huggingface", "revision": "x"}},
    }

    assert deep_merge(base, {"data": {"type": "list", "items": ["x"]}})["data"] == {"type": "list", "items": ["x"]}
    assert deep_merge(base, {"data": {"type": "dataset", "seed": 2}})["data"] == {
        "type": "dataset",
        "url": "a/b",
        "seed": 2,
    }
    assert deep_merge(base, {"model": {"source": {"type": "local"}}})["model"] == {"source": {"type": "local"}}


DAGS = st.integers(1, 8).flatmap(
    lambda size: st.tuples(*(st.sets(st.integers(0, max(0, n - 1)), max_size=3) for n in range(size))).map(
        lambda rows: {f"s{n}": [f"s{d}" for d in sorted(row) if d < n] for n, row in enumerate(rows)}
    )
)


@given(DAGS, st.randoms())
def test_topological_order_keeps_every_edge(edges, random):
    names = list(edges)
    random.shuffle(names)
    order = topological({name: edges[name] for name in names})

    assert sorted(order) == sorted(edges)
    assert all(order.index(below) < order.index(name) for name in edges for below in edges[name])
    assert find_cycle(edges) is None
    assert all(name not in upstream(edges, name) for name in edges)


def test_order_is_the_order_given_where_it_is_free():
    assert topological({"c": [], "a": [], "b": ["c"]}) == ["c", "a", "b"]


def test_a_cycle_is_named_along_its_way():
    assert find_cycle({"x": ["a"], "a": ["b"], "b": ["c"], "c": ["a"]}) == ["a", "b", "c", "a"]


def test_a_long_chain_needs_no_recursion():
    entries = [{"name": f"s{n}"} for n in range(900)]

    assert len(parse({"taskType": "echo", "stages": entries}).stages) == 900


def test_a_graph_is_ordered_by_what_it_refers_to():
    nodes = [
        {"name": "last", "spec": {"echo": {"message": "${left.x} ${right.x}"}}},
        {"name": "left", "spec": {"echo": {"message": "${root.x}"}}},
        {"name": "right", "dependsOn": "root"},
        {"name": "root"},
    ]
    template = parse({"taskType": "echo", "graph": {"nodes": nodes}})

    assert template.stage_names == ("root", "left", "right", "last")
    assert template.stage("last").depends_on == ("left", "right")


def test_a_single_task_is_one_stage():
    assert parse({"taskType": "echo"}).stages[0].name == "echo"
    named = parse({"apiVersion": "gpuflow/v1", "metadata": {"name": "My job"}, "spec": {"taskType": "echo"}})
    assert (named.stages[0].name, named.is_pipeline) == ("My job", False)


def test_a_matrix_is_the_product_in_order():
    spec = {"taskType": "echo", "echo": {"message": "x"}}

    expanded = expand_matrix(spec, {"echo.steps": [1, 2], "priority": [3, 4]})

    assert [(one["echo"]["steps"], one["priority"]) for one in expanded] == [
        (1, 3), (1, 4), (2, 3), (2, 4),
    ]  # fmt: skip
    assert expand_matrix(spec, None) == [spec]
    assert spec == {"taskType": "echo", "echo": {"message": "x"}}


def test_set_path():
    assert set_path({}, "a.b", 1) == {"a": {"b": 1}}
    assert set_path({"a": [1, {"b": 2}]}, "a[1].b", 3) == {"a": [1, {"b": 3}]}
    for path in ("a[5]", "a.b", "", ".a", "a..b", "a[x]"):
        with pytest.raises(ValueError, match=r"is not a path|leads nowhere"):
            set_path({"a": [1]}, path, 0)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "quickstart.yaml").write_text("apiVersion: gpuflow/v1\nspec: {taskType: echo}\n")
    (tmp_path / "pipelines" / "broken.yaml").write_text("- a\n")
    monkeypatch.setattr("gpuflow.spec.presets.configs_root", lambda: tmp_path)
    return tmp_path


def test_presets_by_name(shipped):
    assert list_presets("pipelines") == ["broken", "quickstart"]
    assert load_preset("pipelines", "quickstart")["spec"] == {"taskType": "echo"}
    assert parse("quickstart").source == "pipelines/quickstart"
    for name, words in (("quikstart", "did you mean quickstart"), ("../x", "no preset"), ("broken", "not a mapping")):
        with pytest.raises(GPUFlowError, match=words):
            load_preset("pipelines", name)
    with pytest.raises(GPUFlowError, match="the kinds are"):
        list_presets("things")
    with pytest.raises(GPUFlowError, match="did you mean quickstart"):
        parse("quickstat")


def test_a_file_of_the_name_goes_before_a_shipped_one(shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("apiVersion: gpuflow/v1\nmetadata: {name: mine}\nspec: {taskType: echo}\n")

    assert parse("quickstart").name == "mine"


def test_every_shipped_config_is_readable():
    assert configs_root().is_dir()
    for kind in KINDS:
        for name in list_presets(kind):
            assert load_preset(kind, name)
    for name in list_presets("pipelines"):
        assert parse(name).stages


def test_presets_and_references_need_no_pydantic():
    code = (
        "import sys, gpuflow.spec.presets, gpuflow.spec.references; "
        "heavy = {'pydantic', 'torch', 'celery', 'redis'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(60))


def test_every_public_name_is_there():
    import gpuflow.spec

    assert sorted(gpuflow.spec.__all__) == sorted(gpuflow.spec._HOME) == dir(gpuflow.spec)
    for name in gpuflow.spec.__all__:
        assert callable(getattr(gpuflow.spec, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gpuflow.spec.nothing
