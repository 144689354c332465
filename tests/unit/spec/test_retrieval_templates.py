"""Templates of rag: what makes an index, what asks, and what contradicts."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import parse
from gpuflow.spec.checking import canonical
from gpuflow.spec.presets import list_presets, preset_path

MODEL = {"embedding": {"model": "m"}}
LISTED = {"type": "list", "items": ["x"]}


def rag(**fields: Any) -> dict[str, Any]:
    spec = canonical({"taskType": "rag", **fields})
    assert canonical(spec) == spec
    return spec


@pytest.mark.parametrize(
    ("given", "section"),
    [
        ({"index": "https://h/final_index.tar.gz"}, {"index": {"url": "https://h/final_index.tar.gz"}}),
        ({"index": "/there/final_index"}, {"index": {"path": "/there/final_index"}}),
        ({"index": {"url": "http://h/x", "type": "http"}}, {"index": {"url": "http://h/x", "type": "http"}}),
        ({"documents": ["a", {"text": "b"}]}, {"documents": {"type": "list", "items": ["a", {"text": "b"}]}}),
        ({"documents": {"path": "/docs"}}, {"documents": {"type": "documents", "path": "/docs"}}),
        ({"documents": {"path": "/a.jsonl"}}, {"documents": {"type": "jsonl", "path": "/a.jsonl"}}),
    ],
)  # fmt: skip
def test_what_is_searched_has_one_form(given: dict[str, Any], section: dict[str, Any]) -> None:
    assert rag(search=given, query="x", **MODEL)["search"] == section


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"upload": "./docs"}, "documents"), ({"path": "/docs/a.md"}, "documents"), ({"upload": "a.csv"}, "csv"),
        ({"url": "https://h/docs.tar.gz"}, "documents"), ({"url": "org/name"}, "dataset"), ({"items": ["x"]}, "list"),
        ({"type": "jsonl", "path": "/rows"}, "jsonl"),
    ],
)  # fmt: skip
def test_files_of_an_index_are_documents_unless_they_have_rows(data: dict[str, Any], kind: str) -> None:
    assert rag(index={}, data=data, **MODEL)["data"]["type"] == kind


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query": "x", **MODEL}, r"spec\.search: is missing: a task that asks needs search\.index"),
        ({"query": "x", "search": {"top_k": 3}, **MODEL}, r"spec\.search: is missing"),
        ({"query": "x", "search": {"documents": ["a"]}}, r"spec\.embedding\.model: is required and missing"),
        ({"query": "x", "search": {"documents": ["a"], "index": "/i"}, **MODEL}, "one source too many"),
        ({"query": "x", "search": {"index": "/i", "chunks": {"size": 9}}}, r"chunks: cuts search\.documents"),
        ({"query": "x", "data": LISTED, "search": {"index": "/i"}}, "query: and data both hold questions"),
        ({"data": {"type": "documents", "path": "/d"}, "search": {"index": "/i"}}, "add `index: {}`"),
        ({"index": {}, "query": "x", "data": LISTED, **MODEL}, "query: belongs to a task that asks"),
        ({"index": {}, "data": LISTED, "parallel": {"enabled": True}, **MODEL}, "parallel: splits the data over tasks"),
        ({"index": {}, "data": LISTED}, r"embedding\.model: is required"),
        ({"index": {}, "query": "x", **MODEL}, r"data: is missing: `index` needs documents"),
        ({"index": {"chunks": {"size": 10, "overlap": 6}}, "data": LISTED, **MODEL}, "at most half of size"),
        ({"query": "x", "search": {"index": "/i"}, "engine": "vllm"}, "'vllm', which runs no retrieval"),
        ({"query": [], "search": {"index": "/i"}}, "must be text or a list of texts"),
        ({"query": "x", "qdrant": {"url": "h:6333", "collection": "c"}, **MODEL}, "is no URL of a server"),
        ({"query": "x", "search": {"index": {"url": "a", "path": "b"}}}, "needs url or path, one of them"),
        ({"index": {}, "data": {**LISTED, "include": ["*.md"]}, **MODEL}, "has include"),
    ],
)
def test_what_contradicts_is_said_before_anything_runs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidTemplate, match=message):
        rag(**fields)


def test_documents_are_for_rag() -> None:
    with pytest.raises(InvalidTemplate, match=r"data\.type: is 'documents', which taskType rag reads"):
        canonical({"taskType": "echo", "data": {"type": "documents", "path": "/d"}})


def test_a_prefix_of_passages_is_for_rag() -> None:
    with pytest.raises(InvalidTemplate, match=r"embedding\.passage_prefix: is of taskType rag"):
        canonical({"taskType": "embedding", "data": LISTED, "embedding": {"model": "m", "passage_prefix": "p: "}})


def test_sampling_without_a_model_is_told() -> None:
    document = {
        "apiVersion": "gpuflow/v1",
        "spec": {"taskType": "rag", "query": "x", "search": {"index": "/i"}, "inference": {"max_tokens": 3}},
    }

    assert "without model.source the passages are the result" in str(parse(document).warnings)


def test_the_shipped_pipeline_makes_an_index_and_asks_it() -> None:
    make, ask = parse(preset_path("pipelines", "rag")).stages

    assert make.spec["embedding"]["model"] in list_presets("models")
    assert ask.spec["model"]["source"]["identifier"] in list_presets("models")
    assert len(make.spec["data"]["items"]) <= 10


def test_an_index_of_another_stage_is_a_dependency() -> None:
    stages = [
        {"name": "make", "spec": {"index": {}, "data": LISTED, **MODEL}},
        {"name": "ask", "spec": {"search": {"index": "${make.result.final_index_archive_url}"}, "query": "x"}},
    ]

    template = parse({"apiVersion": "gpuflow/v1", "spec": {"taskType": "rag", "stages": stages}})

    assert template.stages[1].spec["search"] == {"index": {"url": "${make.result.final_index_archive_url}"}}
    assert template.stages[1].depends_on == ("make",)
