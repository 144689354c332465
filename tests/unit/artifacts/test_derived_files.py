"""Files made of a result: other names of artifacts, and rows; links that a task has left lead nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuflow.artifacts import derived
from gpuflow.artifacts.derived import export_rows, write_aliases
from gpuflow.artifacts.manifest import seal_results
from gpuflow.errors import ArtifactError

ITEMS = [
    {"index": 0, "input": "a", "output": "A", "metadata": {"id": 7}},
    {"index": 1, "input": "b", "output": "", "finish_reason": "stop"},
]


def test_results_json_stands_beside_responses_json_and_what_is_missing_is_told(tmp_path: Path) -> None:
    spec = {
        "output": {"artifacts": ["results.json", "logs", "plot.png"], "aliases": {"results.json": "responses.json"}}
    }
    sealed = seal_results(tmp_path, {"items": ITEMS}, [], spec)

    assert (tmp_path / "results.json").read_bytes() == (tmp_path / "responses.json").read_bytes()
    assert "results.json" in sealed.names
    assert sealed.result["missing_artifacts"] == ["logs", "plot.png"]


def test_a_file_of_the_task_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("mine")
    (tmp_path / "responses.json").write_text("{}")
    write_aliases(tmp_path, {"results.json": "responses.json", "more/of/it.json": "responses.json", "x": "nowhere"})

    assert (tmp_path / "results.json").read_text() == "mine"
    assert (tmp_path / "more" / "of" / "it.json").read_text() == "{}"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("aliases", [{"link/file": "responses.json"}, {"copy": "link/secret"}, {"copy": "file-link"}])
def test_links_of_the_task_are_not_followed(tmp_path: Path, aliases: dict[str, str]) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "attempt"
    outside.mkdir()
    folder.mkdir()
    (outside / "secret").write_text("hidden")
    (folder / "responses.json").write_text("{}")
    (folder / "link").symlink_to(outside)
    (folder / "file-link").symlink_to(outside / "secret")

    with pytest.raises(ArtifactError, match="a link that the task has left"):
        write_aliases(folder, aliases)
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert not (folder / "copy").exists()


def test_rows_are_exported_by_field(tmp_path: Path) -> None:
    fields = {
        "question": "prompt",
        "answer": {"from": "output", "fallback": "-"},
        "id": "metadata.id",
        "why": "item.finish_reason",
        "kind": "fixed",
        "whole": {"from": "metadata"},
        "n": 3,
    }
    spec = {"postprocess": {"jsonl_export": {"path": "out/rows.jsonl", "fields": fields}}}
    sealed = seal_results(tmp_path, {"items": ITEMS}, [], spec, lambda name: f"http://store/{name}")

    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert rows == [
        {
            "question": "a",
            "answer": "A",
            "id": 7,
            "why": None,
            "kind": "fixed",
            "whole": {"prompt": "a", "id": 7},
            "n": 3,
        },
        {"question": "b", "answer": "-", "id": None, "why": "stop", "kind": "fixed", "whole": {"prompt": "b"}, "n": 3},
    ]
    assert sealed.result["jsonl_export"] == {
        "path": str(tmp_path / "out" / "rows.jsonl"),
        "url": "http://store/out/rows.jsonl",
        "record_count": 2,
        "fields": list(fields),
    }
    assert "out/rows.jsonl" in sealed.names


@pytest.mark.parametrize(
    ("result", "export", "words"),
    [
        ({}, {"path": "a", "fields": {"x": "output"}}, "no items"),
        ({"items": ITEMS}, {"path": "a", "fields": {"x": "output"}, "required_fields": ["x"]}, "item 1 has no x"),
        ({"items": ITEMS}, {"path": "taken", "fields": {"x": "output"}}, "is a file of the task"),
    ],
)
def test_what_cannot_be_exported_fails(tmp_path: Path, result: dict, export: dict, words: str) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ArtifactError, match=words):
        export_rows(tmp_path, result, export, None)


@pytest.mark.parametrize(("bound", "value"), [("MOST_VALUES", 3), ("MOST_BYTES", 100)])
def test_an_export_that_repeats_its_items_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(derived, bound, value)
    with pytest.raises(ArtifactError, match="export fewer fields"):
        export_rows(tmp_path, {"items": ITEMS}, {"path": "a", "fields": {"x": {"from": "item"}, "y": "output"}}, None)
