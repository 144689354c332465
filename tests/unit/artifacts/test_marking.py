"""What is found again is marked as used, so that neither the limit of the cache nor retention takes it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from executors.cache_trim import entries, remove, trim
from gpuflow.artifacts.archive import pack
from gpuflow.artifacts.data_files import local_data
from gpuflow.artifacts.inputs import localize
from gpuflow.artifacts.marking import mark_used
from gpuflow.artifacts.references import References, json_bytes, make_reference
from gpuflow.artifacts.store import open_store
from gpuflow.gateway.files import ResultsFolder
from gpuflow.gateway.uploads import Ask, Limits, Uploads
from gpuflow.settings import Settings
from gpuflow.upkeep.results_cleaning import _uploads

LONG_AGO = 1_000_000.0
CONTENT = b'{"prompt": "p"}\n'
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(results_dir=tmp_path / "results", cache_dir=tmp_path / "cache")


def age(path: Path) -> None:
    for one in [path, *path.rglob("*")]:
        os.utime(one, (LONG_AGO, LONG_AGO))


def used_at(settings: Settings) -> float:
    (entry,) = entries(settings.cache_dir)
    return entry.used_at


def test_a_checkpoint_that_is_unpacked_already(settings: Settings, tmp_path: Path) -> None:
    weights = tmp_path / "final_model"
    weights.mkdir()
    (weights / "model.bin").write_bytes(b"weights")
    pack(weights, tmp_path / "m.tar.gz")
    spec = {"checkpoint": {"load": {"path": str(tmp_path / "m.tar.gz")}}}
    first = localize(spec, settings=settings).checkpoint_path
    age(settings.cache_dir / "checkpoints")
    assert used_at(settings) == LONG_AGO

    assert localize(spec, settings=settings).checkpoint_path == first

    assert used_at(settings) > LONG_AGO
    assert trim(settings.cache_dir, 0) == []


def test_data_that_is_here_already(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        assert (settings.cache_dir / "data" / DIGEST).stat().st_mtime > LONG_AGO, "marked before it is looked at"

    kept = settings.cache_dir / "data" / DIGEST / "a.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(CONTENT)
    age(kept.parent)
    monkeypatch.setattr("gpuflow.artifacts.data_files.fetch", refuse)

    local = local_data({"type": "jsonl", "url": "https://h/a.jsonl", "sha256": DIGEST}, settings)

    assert local["path"] == str(kept)
    assert used_at(settings) > LONG_AGO


def test_a_reference_that_is_here_already(settings: Settings) -> None:
    content = json_bytes([1])
    reference = make_reference([1], content, "https://h/x.json")
    kept = settings.cache_dir / "references" / hashlib.sha256(content).hexdigest()
    kept.parent.mkdir(parents=True)
    kept.write_bytes(content)
    age(kept.parent)

    assert References(settings).load(reference) == [1]

    assert used_at(settings) > LONG_AGO


def test_an_upload_that_is_stored_already(settings: Settings, tmp_path: Path) -> None:
    store = open_store(settings.results_dir.as_uri(), settings=settings)
    source = tmp_path / "a.jsonl"
    source.write_bytes(CONTENT)
    store.put(source, f"uploads/{DIGEST}/a.jsonl")
    age(settings.results_dir)
    before = (settings.results_dir / "uploads" / DIGEST / "a.jsonl").stat()

    store.put(source, f"uploads/{DIGEST}/a.jsonl")

    (upload,) = _uploads(settings.results_dir)
    assert upload.written_at > LONG_AGO
    after = (settings.results_dir / "uploads" / DIGEST / "a.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "whoever fetches it can go on"


def test_an_upload_that_a_gateway_has_already(settings: Settings) -> None:
    folder = settings.results_dir / "uploads" / DIGEST
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(CONTENT)
    age(settings.results_dir)
    uploads = Uploads(ResultsFolder(settings.results_dir), Limits())
    ask = Ask(task_id="uploads", name=f"{DIGEST}/a.jsonl", offset=0, length=len(CONTENT), sha256="0" * 64)

    assert uploads.stored(ask) is None
    assert next(iter(_uploads(settings.results_dir))).written_at == LONG_AGO
    found = uploads.stored(Ask(**{**vars(ask), "sha256": DIGEST}))

    assert found is not None and found.size == len(CONTENT)
    assert next(iter(_uploads(settings.results_dir))).written_at > LONG_AGO


def test_what_is_found_again_while_the_cache_is_trimmed_stays(settings: Settings) -> None:
    kept = settings.cache_dir / "references" / "a"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"x")
    age(kept.parent)
    (chosen,) = entries(settings.cache_dir)

    assert mark_used(kept)

    assert not remove(settings.cache_dir, chosen)
    assert kept.exists()


def test_what_is_not_there_cannot_be_marked(tmp_path: Path) -> None:
    assert not mark_used(tmp_path / "away")
