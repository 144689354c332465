"""Data sets whose README.md names files that are not theirs: the library would read whatever the worker's user can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executors.data.hub import hub_rows
from gpuflow.errors import NotAllowed

pytestmark = pytest.mark.ml


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "own.jsonl").write_text(json.dumps({"text": "own"}))
    return folder


def names(folder: Path, *files: str) -> None:
    files_of = [{"split": "train", "path": list(files)}]
    configs = json.dumps([{"config_name": "default", "data_files": files_of}])
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")


def rows(folder: Path) -> list[Any]:
    return hub_rows({"type": "dataset", "url": str(folder)}, "train")


@pytest.mark.parametrize("way", ["absolute", "above", "pattern", "link"])
def test_a_file_of_others_is_not_read(data_set: Path, way: str) -> None:
    others = data_set.parent / "results"
    others.mkdir()
    (others / "responses.jsonl").write_text(json.dumps({"text": "private"}))
    (data_set / "link.jsonl").symlink_to(others / "responses.jsonl")
    named = {
        "absolute": str(others / "responses.jsonl"),
        "above": "../results/responses.jsonl",
        "pattern": f"{others}/*.jsonl",
        "link": "link.jsonl",
    }[way]
    names(data_set, "own.jsonl", named)

    with pytest.raises(NotAllowed, match=r"its README\.md names .*, which is none of its own files"):
        rows(data_set)


def test_its_own_files_are_read(data_set: Path) -> None:
    assert rows(data_set) == [{"text": "own"}]
    names(data_set, "own.jsonl")
    assert rows(data_set) == [{"text": "own"}]
