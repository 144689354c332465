"""`data.upload`: checked first, sent once, and only for the one who wrote the template."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuflow.artifacts.inputs import localize
from gpuflow.artifacts.local_store import LocalStore
from gpuflow.artifacts.store import Progress, StoredFile, file_url_path
from gpuflow.artifacts.throttle import Throttle
from gpuflow.artifacts.upload_view import upload_bar
from gpuflow.artifacts.uploads import refuse_uploads, with_uploads
from gpuflow.errors import InvalidTemplate
from gpuflow.settings import Settings
from gpuflow.spec import Template, parse

MODEL = {"source": {"type": "local", "identifier": "x"}}


class Watched(LocalStore):
    """A folder that remembers what was put into it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, throttle=Throttle(None))
        self.puts: list[str] = []

    def put(self, source: Path, name: str, *, progress: Progress | None = None) -> StoredFile:
        self.puts.append(name)
        return super().put(source, name, progress=progress)


@contextmanager
def no_bar(name: str, size: int) -> Iterator[None]:
    yield None


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with one file of rows."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    (place / "rows.jsonl").write_text('{"prompt": "a"}\n')
    return place


def task(data: dict[str, Any], **fields: Any) -> Template:
    return parse({"taskType": "inference", "model": MODEL, "data": data, **fields})


def sent(template: Template, store: Watched) -> Template:
    return with_uploads(template, lambda: store, no_bar)


def test_an_upload_becomes_a_url_with_its_digest(folder: Path, store: Watched) -> None:
    digest = hashlib.sha256((folder / "rows.jsonl").read_bytes()).hexdigest()

    (stage,) = sent(task({"upload": "./rows.jsonl", "columns": {"prompt": "prompt"}}), store).stages

    url = store.url(f"uploads/{digest}/rows.jsonl")
    assert stage.spec["data"] == {"type": "jsonl", "url": url, "sha256": digest, "columns": {"prompt": "prompt"}}
    assert store.puts == [f"uploads/{digest}/rows.jsonl"]


def test_paths_are_relative_to_the_file_of_the_template(folder: Path, store: Watched, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.csv").write_text("prompt\na\n")
    (other / "t.yaml").write_text(
        "apiVersion: gpuflow/v1\nspec:\n  taskType: inference\n"
        "  model: {source: {type: local, identifier: x}}\n  data: {upload: mine.csv}\n"
    )

    (stage,) = sent(parse(other / "t.yaml"), store).stages

    assert stage.spec["data"]["type"] == "csv"
    assert stage.spec["data"]["url"].endswith("/mine.csv")


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.jsonl", "rows.json"])
def test_the_type_is_that_of_the_suffix(folder: Path, store: Watched, name: str) -> None:
    (folder / name).write_text("x\n1\n")

    (stage,) = sent(task({"upload": name}), store).stages

    assert stage.spec["data"]["type"] == Path(name).suffix[1:].replace("json", "jsonl").replace("jsonll", "jsonl")


def test_names_that_a_store_would_refuse_are_made_plain(folder: Path, store: Watched) -> None:
    for name in (".gpuflow-x.csv", "a b\n'ü.csv", "x" * 200 + ".csv"):
        (folder / name).write_text("prompt\na\n")
        (stage,) = sent(task({"upload": f"./{name}"}), store).stages
        assert stage.spec["data"]["url"].endswith(".csv")


def test_every_wrong_file_is_told_at_once_and_nothing_is_sent(folder: Path, store: Watched) -> None:
    (folder / "empty.csv").touch()
    (folder / "folder.csv").mkdir()
    stages = [
        {"name": name, "spec": {"data": {"upload": upload}}}
        for name, upload in (
            ("good", "rows.jsonl"),
            ("missing", "nowhere.csv"),
            ("hollow", "empty.csv"),
            ("heap", "folder.csv"),
            ("later", "${good.result.x}.csv"),
        )
    ]
    template = parse({"taskType": "inference", "model": MODEL, "stages": stages})

    with pytest.raises(InvalidTemplate) as caught:
        sent(template, store)

    told = {mistake.path: mistake.message for mistake in caught.value.mistakes}
    assert list(told) == [f"spec.stages.{name}.data.upload" for name in ("missing", "hollow", "heap", "later")]
    for path, says in zip(told, ("no file here", "is empty", "a folder", "reference"), strict=True):
        assert says in told[path]
    assert store.puts == []


def test_without_a_store_the_setting_is_named(folder: Path) -> None:
    with pytest.raises(InvalidTemplate, match="GPUFLOW_STORE_URL"):
        with_uploads(task({"upload": "rows.jsonl"}), lambda: None, no_bar)


def test_a_file_of_several_stages_is_sent_once_and_the_base_spec_follows(folder: Path, store: Watched) -> None:
    stages = [{"name": name, "spec": {"inference": {"max_tokens": 1}}} for name in ("a", "b")]
    template = parse({"taskType": "inference", "model": MODEL, "data": {"upload": "rows.jsonl"}, "stages": stages})

    done = sent(template, store)

    assert len(store.puts) == 1
    urls = {stage.spec["data"]["url"] for stage in done.stages} | {done.spec["data"]["url"]}
    assert len(urls) == 1
    assert "'upload'" not in str(done.to_dict()["stages"])
    assert Template.from_dict(done.to_dict()).stages == done.stages


@pytest.mark.parametrize(
    "matrix",
    [
        {"data.upload": ["rows.jsonl", "more.csv"]},
        {"data": [{"upload": "rows.jsonl"}, {"upload": "more.csv"}]},
        {"inference.seed": [1], "data": [{"upload": "rows.jsonl"}, {"upload": "more.csv"}]},
    ],
)
def test_the_files_of_a_matrix_are_sent(folder: Path, store: Watched, matrix: dict[str, list[Any]]) -> None:
    (folder / "more.csv").write_text("prompt\nb\n")
    stage = {"name": "a", "spec": {"data": {"upload": "rows.jsonl"}}, "matrix": matrix}
    template = parse({"taskType": "inference", "model": MODEL, "stages": [stage]})

    (made,) = sent(template, store).stages
    specs = made.tasks(lambda reference: None)

    assert [spec["data"]["url"].partition("#")[0].rpartition("/")[2] for spec in specs] == ["rows.jsonl", "more.csv"]
    assert all("sha256" in spec["data"] or "#sha256=" in spec["data"]["url"] for spec in specs)
    assert not any("upload" in spec["data"] for spec in specs)


def test_the_file_of_the_evaluation_is_sent_too(folder: Path, store: Watched) -> None:
    (folder / "eval.jsonl").write_text('{"prompt": "b"}\n')

    (stage,) = sent(
        task({"upload": "rows.jsonl", "eval_split": {"upload": "eval.jsonl"}}, taskType="sft"), store
    ).stages

    assert stage.spec["data"]["eval_split"].keys() == {"url", "sha256"}
    assert len(store.puts) == 2


def test_a_template_of_somebody_else_may_not_name_files() -> None:
    with pytest.raises(InvalidTemplate, match=r"spec\.data\.upload"):
        refuse_uploads(task({"upload": "/etc/passwd"}))
    refuse_uploads(task({"path": "/data/a.csv"}))


def test_progress_adds_up_to_the_file(folder: Path, store: Watched) -> None:
    told: list[int] = []

    @contextmanager
    def bar(name: str, size: int) -> Iterator[Progress]:
        assert (name, size) == ("rows.jsonl", 16)
        yield told.append

    with_uploads(task({"upload": "rows.jsonl"}), lambda: store, bar)

    assert sum(told) == 16


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_in_a_terminal_for_large_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")

    with upload_bar("small.csv", 1000) as advance:
        assert advance is None
    assert shown.getvalue() == ""
    with upload_bar("large\x1b[31m.csv", 50 << 20) as advance:
        assert advance is not None
        advance(25 << 20)
    assert "sending large.csv" in shown.getvalue()
    assert "\x1b[31m.csv" not in shown.getvalue()

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with upload_bar("large.csv", 50 << 20) as advance:
        assert advance is None


def test_the_evaluation_files_of_a_matrix_are_sent(folder: Path, store: Watched) -> None:
    (folder / "more.jsonl").write_text('{"prompt": "b"}\n')
    spec = {"data": {"upload": "rows.jsonl", "eval_split": {"upload": "rows.jsonl"}}}
    stage = {"name": "a", "spec": spec, "matrix": {"data.eval_split.upload": ["rows.jsonl", "more.jsonl"]}}
    template = parse({"taskType": "sft", "model": MODEL, "stages": [stage]})

    (made,) = sent(template, store).stages
    found = [spec["data"]["eval_split"] for spec in made.tasks(lambda reference: None)]

    assert [set(one) for one in found] == [{"url"}, {"url"}]
    assert len({one["url"] for one in found}) == 2


def rag(**fields: Any) -> Template:
    return parse({"taskType": "rag", "embedding": {"model": "m"}, **fields})


def test_a_folder_of_documents_is_sent_as_an_archive(folder: Path, store: Watched) -> None:
    (folder / "docs" / ".git").mkdir(parents=True)
    (folder / "docs" / "a.md").write_text("text")
    (folder / "docs" / ".git" / "b").write_text("left out")

    made, asked = (
        sent(template, store).stages[0].spec
        for template in (
            rag(index={}, data={"upload": "./docs", "include": ["*.md"]}),
            rag(search={"documents": {"upload": "./docs"}}, query="x"),
        )
    )

    digest = made["data"]["sha256"]
    assert made["data"] == {
        "type": "documents", "include": ["*.md"], "sha256": digest,
        "url": store.url(f"uploads/{digest}/docs.tar.gz"),
    }  # fmt: skip
    documents = asked["search"]["documents"]
    assert (documents["url"], documents["sha256"], "upload" in documents) == (made["data"]["url"], digest, False)
    archive = file_url_path(made["data"]["url"])
    with tarfile.open(archive) as opened:
        assert opened.getnames() == ["docs/a.md"]
    here = localize(asked, settings=Settings(cache_dir=folder / "cache")).spec["search"]["documents"]
    assert [path.name for path in Path(here["path"]).iterdir()] == ["a.md"]
    asks = rag(search={"index": archive.as_uri()}, query="x").stages[0].spec
    index = localize(asks, settings=Settings(cache_dir=folder / "cache"))
    assert index.spec["search"]["index"] == {"path": here["path"]}
    single = sent(rag(index={}, data={"upload": "docs/a.md"}), store).stages[0].spec["data"]
    assert single["url"].endswith("/a.md")


def test_documents_that_cannot_be_sent_are_named(folder: Path, store: Watched) -> None:
    for template, path in (
        (rag(index={}, data={"upload": "./nothing"}), "spec.data.upload"),
        (rag(search={"documents": {"upload": "./nothing"}}, query="x"), "spec.search.documents.upload"),
    ):
        with pytest.raises(InvalidTemplate, match=rf"{re.escape(path)}: is './nothing'"):
            sent(template, store)
        with pytest.raises(InvalidTemplate, match=re.escape(path)):
            refuse_uploads(template)
