"""Paths that lead out of what a task may read or write: links, `..`, /proc, swaps while they are opened."""

from __future__ import annotations

import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from executors import task_access
from executors.data.sources import read_entries
from executors.echo import Echo
from executors.modeling.location import resolve
from executors.retrieval.documents import open_documents
from gpuflow.artifacts.destination import destination_store
from gpuflow.artifacts.inputs import localize
from gpuflow.artifacts.task_access import MOST_NAMED, Access, limited_to, results_of, task_roots
from gpuflow.errors import GPUFlowError, InvalidSettings, NotAllowed
from gpuflow.policy.child import child_policy
from gpuflow.policy.hosts import Hosts
from gpuflow.policy.roots import Roots, opened, writable
from gpuflow.protocol import Emitter, Request
from gpuflow.settings import Settings

SECRET = '{"key": "secret"}\n'


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder `open` that tasks may read, and `closed` beside it, with one file each."""
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(SECRET if name == "closed" else '{"a": 1}\n')
    return tmp_path


@pytest.fixture
def roots(places: Path) -> Roots:
    return Roots(read=(str(places / "open"),))


def ways_out(places: Path) -> dict[str, str]:
    inside, closed = places / "open", places / "closed"
    (inside / "link").symlink_to(closed / "rows.jsonl")
    (inside / "folder").symlink_to(closed)
    (inside / "far").symlink_to(inside / "link")
    (inside / "relative").symlink_to("../closed/rows.jsonl")
    return {
        "plain": str(closed / "rows.jsonl"),
        "dots": f"{inside}/../closed/rows.jsonl",
        "link": str(inside / "link"),
        "folder": str(inside / "folder" / "rows.jsonl"),
        "far": str(inside / "far"),
        "relative": str(inside / "relative"),
        "beside": f"{inside}x",
        "environ": "/proc/self/environ",
        "root": f"/proc/self/root{closed}/rows.jsonl",
        "cwd": "/proc/self/cwd/x",
        "parent": str(places),
        "missing": "/no/such/file",
        "user": "/etc/passwd",
    }


WAYS = ("plain", "dots", "link", "folder", "far", "relative", "beside", "environ", "root", "cwd", "parent", "missing", "user")  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("way", WAYS)
def test_every_way_out_is_refused_and_tells_nothing(places: Path, roots: Roots, way: str) -> None:
    with pytest.raises(NotAllowed, match="GPUFLOW_READ_ROOTS") as refused, opened(ways_out(places)[way], roots):
        pass
    assert refused.value.setting == "GPUFLOW_READ_ROOTS"


@pytest.mark.parametrize("way", WAYS)
def test_every_way_out_of_every_field(places: Path, roots: Roots, way: str) -> None:
    path = ways_out(places)[way]
    settings = Settings(read_roots=roots.read, results_dir=places / "results", cache_dir=places / "cache")
    specs: list[dict[str, Any]] = [
        {"data": {"type": "jsonl", "path": "${env:P}"}},
        {"data": {"type": "jsonl", "path": f"{places}/open/rows.jsonl", "eval_split": {"path": path}}},
        {"data": {"type": "documents", "path": path}},
        {"data": {"type": "jsonl", "url": Path(path).as_uri()}} if ".." not in path else {"data": {"path": path}},
        {"checkpoint": {"load": {"path": path}}},
        {"checkpoint": {"load": {"url": "file://${env:P}"}}},
        {"model": {"source": {"type": "local", "identifier": path}}},
        {"model": {"source": {"identifier": path}}},
        {"model": {"adapters": [{"path": path}]}},
        {"embedding": {"model": path}},
        {"reward_model": {"path": path}},
        {"reward_model": {"identifier": path}},
        {"search": {"index": {"path": path}}},
        {"search": {"documents": {"type": "documents", "path": path}}},
        {"command": {"path": path}},
        {"data": {"type": "dataset", "url": path}},
        {"data": {"type": "dataset", "url": "${env:P}"}},
        {"model": {"vllm": {"tokenizer": path}}},
        {"model": {"vllm": {"tokenizer": "${env:P}"}}},
        {"model": {"vllm": {"speculative_config": {"model": path}}}},
        {"model": {"transformers": {"gguf_file": path}}},
        {"training": {"chat_template_path": path}},
        {"training": {"deep": [[{"a": [path]}]]}},
        {"echo": {"until_exists": path}},
        {"echo": {"fail": {"unless_exists": path}}},
    ]
    for spec in specs:
        with limited_to(Access(roots=roots, results_of=frozenset())), pytest.raises(NotAllowed) as refused:
            localize(spec, settings=settings, environment={"P": path})
        assert refused.value.setting == "GPUFLOW_READ_ROOTS", spec


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="needs O_PATH")
def test_a_folder_that_is_swapped_for_a_link_all_the_time(places: Path, roots: Roots) -> None:
    real, link, at = places / "real", places / "link", places / "open" / "at"
    real.mkdir()
    (real / "rows.jsonl").write_text('{"a": 1}\n')
    inside = places / "open" / "kept"
    real.rename(inside)
    link.symlink_to(places / "closed")
    ending = threading.Event()

    def swap() -> None:
        while not ending.is_set():
            for target in (inside, places / "closed"):
                fresh = places / "open" / "fresh"
                fresh.symlink_to(target)
                fresh.rename(at)

    at.symlink_to(inside)
    thread = threading.Thread(target=swap)
    thread.start()
    read = refused = 0
    try:
        for _ in range(2000):
            try:
                with opened(at / "rows.jsonl", roots) as found:
                    assert found.place.read_text() == '{"a": 1}\n'
                    read += 1
            except NotAllowed:
                refused += 1
    finally:
        ending.set()
        thread.join()
    assert read and refused


def test_a_pipe_and_a_device_hold_nobody(places: Path, roots: Roots) -> None:
    os.mkfifo(places / "open" / "pipe")

    with opened(places / "open" / "pipe", roots) as found:
        assert not found.is_file
    with pytest.raises(NotAllowed), opened("/dev/zero", roots):
        pass


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, places: Path, roots: Roots) -> Request:
    """This process is the child of a task with these roots."""
    monkeypatch.setattr(task_access, "_roots", None)
    monkeypatch.setattr(task_access, "_hosts", None)
    out = places / "out"
    out.mkdir()
    policy = child_policy(roots, Hosts())
    request = Request(task_id="t", task_type="echo", spec={}, output_dir=str(out), policy=policy)
    task_access.use(Request.from_json(request.to_json()))
    return request


@pytest.mark.parametrize("way", ["plain", "link", "folder", "environ"])
@pytest.mark.usefixtures("child")
def test_the_child_judges_again(places: Path, way: str) -> None:
    path, emitter = ways_out(places)[way], Emitter(None)  # type: ignore[arg-type]

    for kind in ("jsonl", "csv"):
        with pytest.raises(NotAllowed):
            read_entries({"type": kind, "path": path}, None, emitter)
    with pytest.raises(NotAllowed):
        open_documents({"type": "documents", "path": path}, None, emitter)
    with pytest.raises(NotAllowed):
        resolve({"source": {"type": "local", "identifier": path}}, None, emitter)
    with pytest.raises(NotAllowed):
        resolve({"source": {"type": "huggingface", "identifier": str(places / "closed")}}, None, emitter)


@pytest.mark.usefixtures("child")
def test_the_child_reads_what_is_allowed(places: Path) -> None:
    path = places / "open" / "rows.jsonl"
    (places / "open" / "inner").symlink_to(path)

    for name in (path, places / "open" / "inner"):
        assert read_entries({"type": "jsonl", "path": str(name)}, None, Emitter(None)) == [{"a": 1}]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", "~/x", ""])
def test_the_name_of_an_artifact(child: Request, name: str) -> None:
    from executors.echo import _write_artifact

    with pytest.raises(NotAllowed):
        _write_artifact(child, Emitter(None), name, 1)  # type: ignore[arg-type]
    assert Echo.task_types == ("echo",)


def test_the_name_of_an_artifact_holds_no_variable(places: Path, roots: Roots) -> None:
    settings = Settings(results_dir=places / "results", cache_dir=places / "cache")
    with limited_to(Access(roots=roots, results_of=frozenset())), pytest.raises(GPUFlowError, match=r"echo\.artifact"):
        localize({"echo": {"artifact": "${env:TOKEN}"}}, settings=settings, environment={"TOKEN": "secret"})


def localized(spec: dict[str, Any], places: Path, roots: Roots) -> None:
    settings = Settings(read_roots=roots.read, results_dir=places / "results", cache_dir=places / "cache")
    with limited_to(Access(roots=roots, results_of=frozenset())):
        localize(spec, settings=settings, environment={})


@pytest.mark.parametrize("section", [("model", "vllm"), ("model", "transformers"), ("training",), ("lora",)])
def test_options_of_libraries(places: Path, roots: Roots, section: tuple[str, ...]) -> None:
    def spec(options: dict[str, Any]) -> dict[str, Any]:
        for name in reversed(section):
            options = {name: options}
        return options

    for name in ("download_dir", "logging_dir", "offload_folder", "x_save_path", "output_dir"):
        with pytest.raises(NotAllowed, match="GPUFLOW_WRITE_ROOTS"):
            localized(spec({name: str(places / "open")}), places, roots)
        localized(spec({name: str(places / "open" / "new")}), places, Roots(write=roots.read))
    for text in ("../../victim/attempt-1", "a/../../x", "./../x"):
        with pytest.raises(NotAllowed, match="GPUFLOW_READ_ROOTS"):
            localized(spec({"x": [{"y": text}]}), places, roots)
    for given in (
        "org/model",
        "/\n{{ messages }}",
        ".*\\.q_proj",
        "...",
        "./own",
        "https://host/a/../b",
        "",
        "auto",
        1,
    ):
        localized(spec({"x": given, "tokenizer": str(places / "open")}), places, roots)


@pytest.mark.usefixtures("child")
def test_a_data_set_that_is_a_folder_here(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from executors.data.hub import _place

    monkeypatch.chdir(places)
    (places / "closed" / "set").mkdir()
    for url in (str(places / "closed"), "closed", "./closed", "open/../closed", "closed/set", "~", "../x", "a/b/c"):
        with pytest.raises(NotAllowed, match="GPUFLOW_READ_ROOTS"):
            _place(url)
    assert _place(str(places / "open")) == str(places / "open")
    assert [_place(url) for url in ("org/set", "squad")] == ["org/set", "squad"]


@pytest.mark.parametrize("way", ["plain", "folder", "parent", "user"])
def test_a_destination(places: Path, way: str) -> None:
    path = ways_out(places)[way]
    settings = Settings(write_roots=(str(places / "open"),))

    for given in (path, "${env:P}"):
        spec = {"output": {"destination": {"type": "local", "path": given}}}
        with pytest.raises(NotAllowed, match="GPUFLOW_WRITE_ROOTS"):
            destination_store(spec, settings, {"P": path})
    assert writable(places / "open" / "new", task_roots(settings)) == places / "open" / "new"


def test_what_may_be_read_may_not_be_written(places: Path, roots: Roots) -> None:
    with pytest.raises(NotAllowed, match="GPUFLOW_WRITE_ROOTS"):
        writable(places / "open" / "x", roots)


def test_results_of_others(places: Path) -> None:
    settings = Settings(results_dir=places / "results", cache_dir=places / "cache")
    one, other = f"uploads/{'1' * 64}", f"uploads/{'2' * 64}"
    for name in ("mine", "upstream", "others", one, other):
        (places / "results" / name).mkdir(parents=True)
        (places / "results" / name / "a").write_text("x")
    spec = {
        "data": {"path": str(places / "results" / "upstream" / "a")},
        "x": [
            str(places / "results" / "others" / "a"),
            str(places / "results" / "uploads"),
            f"{places}/results/{one}/a",
        ],
        "y": [f"{places}/results/uploads/../others/a", f"{places}/results/uploads/", f"{places}/results/uploads/."],
    }
    owned = results_of(spec, settings, "mine", lambda names: {"upstream", "strange"} & {*names, "strange"})
    roots = task_roots(settings, owned)

    assert owned == {"mine", "upstream", one}
    for name in ("mine", "upstream", one):
        with opened(places / "results" / name / "a", roots):
            pass
    (places / "cache").mkdir()
    for closed in (places / "cache", places / "results" / "uploads", places / "results" / other / "a"):
        with pytest.raises(NotAllowed), opened(closed, roots):
            pass
    for path in (places / "results", places / "results" / "others" / "a", places / "results" / "mine/../others/a"):
        with pytest.raises(NotAllowed), opened(path, roots):
            pass
    # A task's folder that has become a link opens nothing.
    (places / "results" / "mine" / "a").unlink()
    (places / "results" / "mine").rmdir()
    (places / "results" / "mine").symlink_to(places / "closed")
    with pytest.raises(NotAllowed), opened(places / "results" / "mine" / "rows.jsonl", roots):
        pass


def test_of_the_cache_a_task_reads_what_was_brought_for_it(places: Path) -> None:
    settings = Settings(results_dir=places / "results", cache_dir=places / "cache")
    archive = places / "results" / "uploads" / ("1" * 64) / "docs.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(places / "open" / "rows.jsonl", "rows.jsonl")
    theirs = places / "cache" / "checkpoints" / ("2" * 64)
    theirs.mkdir(parents=True)
    spec = {"data": {"type": "documents", "url": archive.as_uri()}}
    readers = results_of(spec, settings, "mine", lambda _: ())
    access = Access(roots=task_roots(settings, readers), results_of=readers)
    with limited_to(access):
        local = localize(spec, settings=settings, environment={}).spec["data"]["path"]
        for closed in (places / "cache", theirs, Path(local), places / "results" / "uploads"):
            with pytest.raises(NotAllowed, match="GPUFLOW_READ_ROOTS"):
                localize({"data": {"type": "documents", "path": str(closed)}}, settings=settings, environment={})

    roots = access.roots_of_child()
    with opened(f"{local}/rows.jsonl", roots) as found:
        assert found.is_file
    for closed in (places / "cache", theirs):
        with pytest.raises(NotAllowed), opened(closed, roots):
            pass


def test_a_spec_that_names_countless_tasks_costs_no_look_up(places: Path) -> None:
    settings = Settings(results_dir=places / "results", cache_dir=places / "cache")
    spec = {"x": [f"{places}/results/t{number}/a" for number in range(MOST_NAMED + 1)]}
    asked: list[Any] = []

    with pytest.raises(NotAllowed, match="at most"):
        results_of(spec, settings, "mine", lambda names: asked.append(names) or ())
    assert not asked


@pytest.mark.parametrize("name", ["GPUFLOW_READ_ROOTS", "GPUFLOW_WRITE_ROOTS"])
@pytest.mark.parametrize("value", ["/", "data", "//"])
def test_a_setting_that_opens_everything_or_nothing(name: str, value: str) -> None:
    with pytest.raises(InvalidSettings, match=name):
        Settings.load(env={name: value})
