"""The task type rag on a tiny model: an index is made, checked and searched, and answers cite its passages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors.generation.prompts import read_prompts
from tests.conformance import faulty_child
from tests.fixtures.executor_child import Ended, child_environment, request_json
from tests.fixtures.executor_here import run_here
from tests.fixtures.fake_qdrant import fake_qdrant
from tests.fixtures.tiny_model import make_tiny_model

pytestmark = pytest.mark.ml

TEXTS = ["The red car is here.", "The green lamp is over there.", "Dear Bo, the blue house is gone."]
FAULTY_CHILD = Path(faulty_child.__file__)
KEY = "canary-key-of-the-rag-tests"


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    (folder / "cars.md").write_text("# Cars\n\nThe red car is here.\n\n## Blue\n\nThe blue car is gone.\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "lamps.txt").write_text("The green lamp is over there.")
    (folder / "blank.txt").write_text(" \n")
    return folder


@pytest.fixture(scope="module")
def made(tiny_model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """An index of the documents, and how it was made."""
    out = tmp_path_factory.mktemp("made")
    spec = {
        "index": {"chunks": {"size": 40, "overlap": 4}},
        "data": {"type": "documents", "path": str(docs)},
        "embedding": {"model": str(tiny_model), "query_prefix": "q: ", "batch_size": 2},
    }
    ended = run_here("rag", spec, out)
    return out / "final_index", ended


def ask(out: Path, question: str | list[str], **fields: Any) -> Ended:
    return run_here("rag", {"query": question, **fields}, out)


def error(out: Path, **fields: Any) -> str:
    record = ask(out, "x", **fields).error
    assert (record["type"], record["retryable"]) == ("BadInput", False)
    return record["message"]


def copy_of(index: Path, to: Path) -> Path:
    return Path(shutil.copytree(index, to / "copy"))


def change(index: Path, **fields: Any) -> None:
    path = index / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# -- making an index --------------------------------------------------------------------------------------------------


def test_an_index_of_a_folder(made: tuple[Path, Ended], tiny_model: Path) -> None:
    folder, ended = made

    result = ended.result
    assert (result["documents"], result["blank_documents"], result["passages"]) == (2, 1, 3)
    assert (result["dimensions"], result["truncated"], result["usage"]["completion_tokens"]) == (128, 0, 0)
    assert [one["path"] for one in ended.named("artifact")] == ["final_index", "responses.json"]
    done = [(one["current"], one["total"], one["unit"]) for one in ended.named("progress")]
    assert done == sorted(done)
    assert done[-1] == (3, 3, "document")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {name: manifest[name] for name in ("format", "schema", "metric", "dimension", "normalize", "model")} == {
        "format": "gpuflow-index", "schema": 1, "metric": "inner_product", "dimension": 128, "normalize": True,
        "model": str(tiny_model),
    }  # fmt: skip
    passages = [json.loads(line) for line in (folder / "passages.jsonl").read_text().splitlines()]
    assert [(one["id"], one["heading"]) for one in passages] == [
        ("cars.md#1", "Cars"), ("cars.md#2", "Cars > Blue"), ("sub/lamps.txt#1", "")
    ]  # fmt: skip
    assert sorted(path.name for path in folder.parent.iterdir()) == ["final_index", "responses.json"]


def test_what_cannot_be_an_index_leaves_none(tmp_path: Path, tiny_model: Path, docs: Path) -> None:
    def failed(data: dict[str, Any], **chunks: Any) -> str:
        spec = {"index": {"chunks": chunks}, "data": data, "embedding": {"model": str(tiny_model)}}
        message = run_here("rag", spec, tmp_path / "out").error["message"]
        assert not list((tmp_path / "out").glob("*"))
        assert not list((tmp_path / "out").glob(".*"))
        return message

    assert "reads 256 of a text" in failed({"type": "documents", "path": str(docs)}, size=300)
    assert "hold no words" in failed({"type": "documents", "path": str(docs / "blank.txt")})
    assert "document 2 has no text" in failed({"items": ["a", "b", {"x": 1}]})


def test_a_child_that_dies_leaves_no_index_and_the_next_attempt_makes_it(tmp_path: Path, tiny_model: Path) -> None:
    spec = {
        "taskType": "rag",
        "index": {},
        "data": {"items": [f"The car {number} is here." for number in range(9)]},
        "embedding": {"model": str(tiny_model), "batch_size": 1},
    }
    argv = [sys.executable, "-P", str(FAULTY_CHILD), "crash", "progress"]  # the first: four of the nine are written

    died = subprocess.run(
        argv, input=request_json("rag", spec, tmp_path / "1").encode(), env=child_environment(), capture_output=True
    )
    again = run_here("rag", spec, tmp_path / "2")

    assert died.returncode == -signal.SIGSEGV, died.stderr
    assert b'"passages": 4' in died.stdout
    assert [path.name for path in (tmp_path / "1").iterdir() if not path.name.startswith(".")] == []
    assert again.result["passages"] == 9
    assert (tmp_path / "2" / "final_index" / "manifest.json").is_file()


# -- searching it -----------------------------------------------------------------------------------------------------


def test_passages_are_the_result_where_no_model_answers(made: tuple[Path, Ended], tmp_path: Path) -> None:
    folder, _ = made

    ended = ask(
        tmp_path, ["Where is the red car?", "And the lamp?"], search={"index": {"path": str(folder)}, "top_k": 2}
    )

    first, second = ended.result["items"]
    assert (first["index"], first["input"], second["input"]) == (0, "Where is the red car?", "And the lamp?")
    assert [one["number"] for one in first["citations"]] == [1, 2]
    assert first["citations"][0]["score"] >= first["citations"][1]["score"]
    assert first["prompt"] == f"{first['output']}\n\nQuestion: Where is the red car?"
    assert first["citations"][0]["text"] in first["output"]
    assert ended.result["retrieval"]["passages"] == 3
    (asked, _) = read_prompts(ended.result["items"], {})  # by a stage of inference
    assert asked.messages == ({"role": "user", "content": first["prompt"]},)
    assert json.loads((tmp_path / "responses.json").read_text())["items"][1]["input"] == "And the lamp?"


def test_a_text_finds_itself_and_a_threshold_leaves_out(made: tuple[Path, Ended], tmp_path: Path) -> None:
    folder, _ = made
    search = {"index": {"path": str(folder)}, "top_k": 10_000}
    question = "The green lamp is over there."

    whole = ask(tmp_path, question, search=search, embedding={"query_prefix": ""}).result
    (item,) = whole["items"]
    assert len(item["citations"]) == 3
    assert (item["citations"][0]["id"], item["citations"][0]["score"]) == (
        "sub/lamps.txt#1",
        pytest.approx(1, abs=1e-4),
    )

    search["score_threshold"] = 0.9999
    few = ask(tmp_path, question, search=search, embedding={"query_prefix": ""}).result
    assert [one["id"] for one in few["items"][0]["citations"]] == ["sub/lamps.txt#1"]
    search["score_threshold"] = 2
    none = ask(tmp_path, question, search=search).result["items"][0]
    assert none["citations"] == []
    assert "none was found" in none["output"]


def test_answers_cite_the_passages_that_were_given(made: tuple[Path, Ended], tmp_path: Path, tiny_model: Path) -> None:
    folder, _ = made
    spec = {
        "search": {"index": {"path": str(folder)}, "top_k": 1},
        "data": {"items": ["Where is the red car?", {"question": "And the lamp?"}]},
        "model": {"source": {"type": "local", "identifier": str(tiny_model)}},
        "inference": {"max_tokens": 3, "temperature": 0, "system_prompt": "Answer.", "stream": True},
    }

    ended = run_here("rag", spec, tmp_path)

    result = ended.result
    assert [item["input"] for item in result["items"]] == ["Where is the red car?", {"question": "And the lamp?"}]
    assert [len(item["citations"]) for item in result["items"]] == [1, 1]
    assert [item["citations"][0]["cited"] for item in result["items"]] == [False, False]
    assert result["usage"]["completion_tokens"] == 6
    assert (result["engine"], result["retrieval"]["embedding_model"]) == ("transformers", str(tiny_model))
    deltas = "".join(one["delta"] for one in ended.named("text_delta") if one["request"] == 0)
    assert deltas == result["items"][0]["output"]
    bad = run_here("rag", {**spec, "inference": {"top_p": 7}}, tmp_path).error
    assert "inference.top_p" in bad["message"]


def test_documents_in_place_are_searched_and_not_kept(tmp_path: Path, tiny_model: Path) -> None:
    fields = {"search": {"documents": TEXTS, "top_k": 1}, "embedding": {"model": str(tiny_model)}}

    (item,) = ask(tmp_path, TEXTS[1], **fields).result["items"]

    assert item["citations"][0]["text"] == TEXTS[1]
    assert [path.name for path in tmp_path.iterdir()] == ["responses.json"]


# -- an index that does not fit ---------------------------------------------------------------------------------------


def test_another_model_is_refused_by_name(made: tuple[Path, Ended], tmp_path: Path, tiny_model: Path) -> None:
    folder, _ = made
    search = {"index": {"path": str(folder)}}
    same = Path(shutil.copytree(tiny_model, tmp_path / "same"))
    other = make_tiny_model(tmp_path / "other", seed=7)

    assert ask(tmp_path / "o", "x", search=search, embedding={"model": str(same)}).result["items"]
    message = error(tmp_path / "o", search=search, embedding={"model": str(other)})
    assert f"the index was made with {tiny_model} (dimension 128), and {other} gives other vectors" in message

    narrow = copy_of(folder, tmp_path)
    change(narrow, dimension=4, probe=[1, 0, 0, 0], passages=2)
    vectors = struct.pack("<8f", *[1.0] * 8)
    (narrow / "index.faiss").write_bytes(struct.pack("<4siqqq?iQ", b"IxFI", 4, 2, 0, 0, True, 0, 8) + vectors)
    lines = (narrow / "passages.jsonl").read_text().splitlines(keepends=True)
    (narrow / "passages.jsonl").write_text("".join(lines[:2]))
    assert "(dimension 4), and" in error(tmp_path / "o", search={"index": {"path": str(narrow)}})


def _cut(name: str, count: int) -> Callable[[Path], object]:
    return lambda index: (index / name).write_bytes((index / name).read_bytes()[:count])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda index: (index / "manifest.json").unlink(), "holds no index"),
        (lambda index: (index / "manifest.json").write_text("["), "is not that of an index"),
        (lambda index: (index / "manifest.json").write_text("[" * 100_000), "is not that of an index"),
        (lambda index: change(index, schema=2), "has schema '2', this version reads 1"),
        (lambda index: change(index, metric="l2"), "has metric 'l2'"),
        (lambda index: change(index, passages=10**9), "is broken"),
        (lambda index: change(index, passages="3"), "is broken"),
        (lambda index: change(index, probe=[1.0]), "is broken"),
        (lambda index: change(index, passages=2), "does not hold its 2 passages"),
        (_cut("passages.jsonl", 30), "does not hold its 3 passages"),
        (_cut("index.faiss", 20), "does not fit its manifest"),
        (_cut("index.faiss", 500), "does not fit its manifest"),
        (lambda index: (index / "index.faiss").unlink(), "has no index.faiss"),
        (lambda index: (index / "index.faiss").write_bytes(b"IwPQ" + os.urandom(2000)), "does not fit its manifest"),
        (lambda index: (index / "passages.jsonl").write_text("[]\n" * 3), "line 1 of the index is no passage"),
    ],
    ids=range(15),
)  # fmt: skip
def test_a_torn_or_foreign_index_is_refused(
    made: tuple[Path, Ended], tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    index = copy_of(made[0], tmp_path)
    harm(index)

    assert message in error(tmp_path / "out", search={"index": {"path": str(index)}, "top_k": 3})


# -- a server ---------------------------------------------------------------------------------------------------------


def test_a_server_is_asked_and_its_key_is_nowhere(tmp_path: Path, tiny_model: Path) -> None:
    vectors = run_here(
        "embedding",
        {"model": {"source": {"type": "local", "identifier": str(tiny_model)}}, "data": {"items": TEXTS}},
        tmp_path / "vectors",
    ).result["items"]
    points = [
        {"id": number, "vector": one["embedding"], "payload": {"text": one["input"], "source": f"{number}.md"}}
        for number, one in enumerate(vectors)
    ]
    with fake_qdrant(collections={"demo": {"size": 128, "points": points}}, key=KEY) as server:
        section = {"url": server.url, "collection": "demo", "api_key": KEY}
        fields = {"embedding": {"model": str(tiny_model)}, "search": {"top_k": 2}}
        ended = ask(tmp_path / "out", TEXTS[2], qdrant=section, **fields)
        wrong = ask(tmp_path / "out", "x", qdrant={**section, "api_key": f"{KEY}-old"}, **fields)

    (item,) = ended.result["items"]
    assert [item["citations"][0][name] for name in ("id", "source", "text")] == ["2", "2.md", TEXTS[2]]
    assert ended.result["retrieval"]["collection"] == "demo"
    assert wrong.error["type"] == "NotAuthorized"
    assert KEY not in repr((ended.events, wrong.events))
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
