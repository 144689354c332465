"""Models travel in an archive: pulled and exported where there is a network, imported and used where there is none."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.modeling.presets import prepared_folder
from gpuflow.artifacts.archive import pack, unpack
from gpuflow.spec.presets import load_preset
from gpuflow.worker.child_environment import OFFLINE
from tests.fixtures.executor_child import ROOT, Child, request_json
from tests.fixtures.hub import COMMIT, hub
from tests.integration.test_offline import GUARD
from tests.support.waiting import patient

PRESET = "smollm2-135m-instruct"
HUB_ID = "ana/tiny"


class Machine:
    """A home, a cache and a hub cache of their own; every connection but to loopback is refused and written down."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.cache, self.home = folder / "cache", folder / "home"
        (folder / "guard").mkdir(parents=True)
        self.home.mkdir()
        (folder / "guard" / "sitecustomize.py").write_text(GUARD)
        self.connections = folder / "connections.txt"
        self.connections.touch()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "GPUFLOW_"))}
        self.environment = {
            **{name: value for name, value in kept.items() if not name.lower().endswith("_proxy")},
            "PYTHONPATH": os.pathsep.join([str(folder / "guard"), str(ROOT)]),
            "GUARD_FILE": str(self.connections),
            "HOME": str(self.home),
            "GPUFLOW_CACHE_DIR": str(self.cache),
            "PIP_INDEX_URL": "https://index.invalid/simple",
            **environment,
        }

    def gpuflow(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from gpuflow.cli import main; main()", "models", *arguments],
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=patient(100),
        )

    def must(self, *arguments: str) -> str:
        done = self.gpuflow(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def child(self, *arguments: str) -> list[dict[str, Any]]:
        """Run the executors' program, and return its events."""
        done = subprocess.run(
            [sys.executable, "-m", "executors.models", *arguments, "--json", "--cache-dir", str(self.cache)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=patient(100),
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def files(self) -> list[str]:
        """What the caches of the machine hold, without locks."""
        found = [*self.cache.rglob("*"), *self.home.rglob("*")]
        return sorted(str(path) for path in found if not path.is_dir() and "locks" not in path.parts)

    def infer(self, folder: Path, source: dict[str, str]) -> dict[str, Any]:
        folder.mkdir()
        spec = {
            "model": {"source": source},
            "data": {"type": "list", "items": ["Hello"]},
            "inference": {"max_tokens": 3},
        }
        child = Child(
            request_json("inference", spec, folder, cache_dir=str(self.cache)), {**self.environment, **OFFLINE}
        )
        try:
            return child.end().result
        finally:
            child.close()


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    return lambda name, **environment: Machine(tmp_path / name, **environment)


@pytest.fixture
def offline(machine: Callable[..., Machine]) -> Machine:
    """A machine with an empty home, and without a network."""
    return machine("offline", GPUFLOW_OFFLINE="1")


def put_preset(machine: Machine, **files: str) -> Path:
    """Put the preset into the cache of a machine as if it had been pulled."""
    folder = prepared_folder(PRESET, load_preset("models", PRESET), str(machine.cache))
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def exported(machine: Callable[..., Machine], tmp_path: Path) -> Path:
    """An archive of the preset with two small files for weights."""
    source = machine("source")
    put_preset(source, config="{}", weights="w" * 5000)
    source.must("export", PRESET, "-o", str(tmp_path / "models.tar.gz"))
    return tmp_path / "models.tar.gz"


@pytest.mark.ml
@pytest.mark.parametrize("suffix", [pytest.param("tar.gz", marks=pytest.mark.long), "tar.zst"])
def test_pulled_exported_imported_and_used_without_a_network(
    machine: Callable[..., Machine], offline: Machine, tmp_path: Path, suffix: str
) -> None:
    from tests.fixtures.tiny_model import make_tiny_model

    archive = tmp_path / f"models.{suffix}"
    model = make_tiny_model(tmp_path / "model")
    (model / "model.onnx").write_bytes(b"for another framework")
    with hub(model, HUB_ID) as address:
        online = machine("online", HF_ENDPOINT=address)
        make_tiny_model(prepared_folder(PRESET, load_preset("models", PRESET), str(online.cache)))
        assert HUB_ID in online.must("pull", f"{HUB_ID}@main", PRESET)
    listed = {row["name"]: row for row in json.loads(online.must("list", "--json"))}
    assert listed[f"{HUB_ID}@main"]["revision"] == COMMIT
    assert "sha256" in online.must("export", HUB_ID, PRESET, "-o", str(archive))

    assert COMMIT in offline.must("import", str(archive))
    assert offline.must("import", str(archive)).count("(was here)") == 2

    assert "model.onnx" not in "".join(offline.files())
    by_preset = offline.infer(tmp_path / "a", {"type": "preset", "identifier": PRESET})
    by_id = offline.infer(tmp_path / "b", {"type": "huggingface", "identifier": HUB_ID})
    assert by_preset["items"][0]["output"] and by_id["items"][0]["output"]
    assert offline.connections.read_text() == ""
    assert offline.gpuflow("pull", HUB_ID).returncode == 0  # it is here
    assert "Offline" not in offline.must("rm", HUB_ID, PRESET)
    assert "not in the cache" in offline.gpuflow("export", HUB_ID, "-o", str(archive)).stderr


@pytest.mark.ml
def test_models_of_the_hub_count_where_the_hub_cache_lies_in_ours(
    machine: Callable[..., Machine], tmp_path: Path
) -> None:
    import fcntl

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"w" * 3_000_000)
    with hub(model, HUB_ID) as address:
        here = machine("here", HF_ENDPOINT=address)
        here.environment["HF_HOME"] = str(here.cache / "huggingface")
        told = here.child("pull", HUB_ID)
    assert [event for event in told if event["event"] == "progress" and event["total"] == 3_000_002]

    with (here.cache / "locks" / "hub-models--ana--tiny.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        held = here.child("trim", "--max-bytes", "1000")
    gone = here.child("trim", "--max-bytes", "1000")

    assert [event["value"]["removed"] for event in held if event["event"] == "result"] == [[]]
    assert [event["value"]["removed"][0]["name"] for event in gone if event["event"] == "result"] == [f"hub/{HUB_ID}"]
    assert not list(here.cache.rglob("model.safetensors"))


def test_the_same_cache_gives_the_same_archive(exported: Path, machine: Callable[..., Machine], tmp_path: Path) -> None:
    other = machine("other")
    put_preset(other, weights="w" * 5000, config="{}")

    other.must("export", PRESET, "-o", str(tmp_path / "again.tar.gz"))

    assert (tmp_path / "again.tar.gz").read_bytes() == exported.read_bytes()


@pytest.mark.ml
def test_another_revision_of_a_model_joins_the_one_that_is_here(offline: Machine, tmp_path: Path) -> None:
    for commit, text in (("a" * 40, "one"), ("b" * 40, "two")):
        archive = hub_archive(tmp_path / commit[:1], commit, text)
        offline.must("import", str(archive))

    repo = offline.home / ".cache" / "huggingface" / "hub" / "models--ana--tiny"
    assert (repo / "snapshots" / ("a" * 40) / "config.json").read_text() == "one"
    assert (repo / "snapshots" / ("b" * 40) / "config.json").read_text() == "two"
    assert (repo / "refs" / "main").read_text() == "b" * 40


def hub_archive(folder: Path, commit: str, text: str, **changes: Any) -> Path:
    """Return an archive with one model of the hub, of one file; `changes` replace parts of its index."""
    import hashlib

    root = folder / "gpuflow-models"
    repo = root / "hub" / "models--ana--tiny"
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (repo / part).mkdir(parents=True)
    blob = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    (repo / "blobs" / blob).write_text(text)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit / "config.json").symlink_to(f"../../blobs/{blob}")
    index = {
        "format": 1,
        "models": [{"name": "ana/tiny", "kind": "hub", "entry": "models--ana--tiny", "revision": commit}],
        "files": {
            f"hub/models--ana--tiny/blobs/{blob}": hashlib.sha256(text.encode()).hexdigest(),
            "hub/models--ana--tiny/refs/main": hashlib.sha256(commit.encode()).hexdigest(),
        },
        "links": {f"hub/models--ana--tiny/snapshots/{commit}/config.json": f"../../blobs/{blob}"},
    }
    (root / "index.json").write_text(json.dumps({**index, **changes}))
    pack(root, folder / "models.tar.gz")
    return folder / "models.tar.gz"


def changed(archive: Path, change: Callable[[Path], object]) -> Path:
    """Return a copy of an archive whose files were changed, packed again."""
    work = archive.parent / "changed"
    unpack(archive, work)
    change(work / "gpuflow-models")
    pack(work / "gpuflow-models", archive.parent / "changed.tar.gz")
    return archive.parent / "changed.tar.gz"


def weights(root: Path) -> Path:
    (found,) = root.glob("models/*/weights")
    return found


def index_with(root: Path, **changes: Any) -> None:
    index = json.loads((root / "index.json").read_text())
    (root / "index.json").write_text(json.dumps({**index, **changes}))


def other_entry(root: Path) -> None:
    (entry,) = (root / "models").iterdir()
    entry.rename(root / "models" / "mine-000000000000")
    text = (root / "index.json").read_text()
    (root / "index.json").write_text(text.replace(entry.name, "mine-000000000000"))


def link_instead(root: Path) -> None:
    weights(root).unlink()
    weights_path = next(root.glob("models/*")) / "weights"
    weights_path.symlink_to("config")


CHANGES = [
    pytest.param(lambda root: weights(root).write_text("w" * 4999 + "v"), "damaged", id="one byte"),
    pytest.param(lambda root: weights(root).unlink(), "missing", id="a file less"),
    pytest.param(lambda root: (root / "models" / "x").write_text("x"), "not listed", id="a file more"),
    pytest.param(
        lambda root: (root / "hub").mkdir() or (root / "hub" / "x").write_text("x"), "not listed", id="in hub"
    ),
    pytest.param(lambda root: (root / "index.json").unlink(), "no index", id="no index"),
    pytest.param(lambda root: (root / "index.json").write_text("{"), "cannot read", id="half an index"),
    pytest.param(lambda root: index_with(root, format=2), "cannot read", id="of a later version"),
    pytest.param(lambda root: index_with(root, models=[]), "cannot read", id="no models"),
    pytest.param(lambda root: index_with(root, files={}), "no file", id="no files"),
    pytest.param(other_entry, "another version", id="an entry that no preset has"),
    pytest.param(link_instead, "index says", id="a link for a file"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_an_archive_that_is_not_what_it_says_leaves_nothing(
    exported: Path, offline: Machine, change: Callable[[Path], object], told: str
) -> None:
    done = offline.gpuflow("import", str(changed(exported, change)))

    assert done.returncode == 1
    assert told in done.stderr and "Traceback" not in done.stderr
    assert offline.files() == []


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_corrupted_byte_of_the_archive_leaves_nothing(exported: Path, offline: Machine, at: float) -> None:
    content = bytearray(exported.read_bytes())
    content[int(len(content) * at)] ^= 0x40
    exported.write_bytes(content)

    done = offline.gpuflow("import", str(exported))

    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert offline.files() == []


def hub_model(entry: str, revision: str) -> dict[str, Any]:
    return {"models": [{"name": "a/b", "kind": "hub", "entry": entry, "revision": revision}]}


HOSTILE_HUB = [
    pytest.param(hub_model("..", "a" * 40), "cannot read", id="entry .."),
    pytest.param(hub_model("blobs", "a" * 40), "no file", id="no model"),
    pytest.param(hub_model("models--ana--tiny", "../x"), "no model of the hub", id="revision"),
    pytest.param(hub_model("models--ana--tiny", "b" * 40), "belongs to none", id="another revision"),
    pytest.param({"links": {}}, "not listed", id="links that are not listed"),
]


@pytest.mark.ml
@pytest.mark.parametrize(("changes", "told"), HOSTILE_HUB)
def test_a_hostile_index_is_refused(offline: Machine, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    done = offline.gpuflow("import", str(hub_archive(tmp_path / "h", "a" * 40, "one", **changes)))

    assert done.returncode == 1, done.stdout
    assert told in done.stderr and "Traceback" not in done.stderr
    assert offline.files() == []


def members(*made: tuple[str, bytes, str]) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for name, kind, link in made:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        info.size = 1 if kind == tarfile.REGTYPE else 0
        yield info, b"x"


@pytest.mark.parametrize(
    "made",
    [
        pytest.param([("gpuflow-models/../../escaped", tarfile.REGTYPE, "")], id="traversal"),
        pytest.param([("/tmp/escaped", tarfile.REGTYPE, "")], id="absolute"),
        pytest.param([("gpuflow-models/out", tarfile.SYMTYPE, "../../..")], id="link out"),
        pytest.param([("gpuflow-models/pipe", tarfile.FIFOTYPE, "")], id="pipe"),
        pytest.param(
            [("gpuflow-models", tarfile.SYMTYPE, "."), ("index.json", tarfile.REGTYPE, "")], id="its folder is a link"
        ),
    ],
)
def test_a_hostile_archive_is_refused(offline: Machine, tmp_path: Path, made: list[tuple[str, bytes, str]]) -> None:
    with tarfile.open(tmp_path / "h.tar.gz", "w:gz") as tar:
        for info, content in members(*made):
            tar.addfile(info, io.BytesIO(content))

    done = offline.gpuflow("import", str(tmp_path / "h.tar.gz"))

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert offline.files() == []
    assert not (tmp_path / "escaped").exists()


def test_bad_names_and_files_end_with_two(offline: Machine, tmp_path: Path) -> None:
    for arguments in (
        ("pull", "no-such-preset"),
        ("export", PRESET, "-o", str(tmp_path / "models.zip")),
        ("export", PRESET, "-o", str(tmp_path / "models.tar.gz")),
        ("import", str(tmp_path / "none.tar.gz")),
        ("rm", PRESET),
    ):
        done = offline.gpuflow(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), (arguments, done.stderr)


def test_what_a_task_uses_is_not_removed(offline: Machine) -> None:
    import fcntl

    folder = put_preset(offline, config="{}")
    (offline.cache / "locks").mkdir()
    with (offline.cache / "locks" / f"models-{folder.name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        done = offline.gpuflow("rm", PRESET)

    assert done.returncode == 1 and "is being used" in done.stderr
    assert offline.must("rm", PRESET)
    assert not folder.exists()
