"""Seals the folder of an attempt: archives, responses.json, large fields, manifest.json. Then it stays as it is."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from gpuflow.artifacts.archive import pack
from gpuflow.artifacts.derived import export_rows, write_aliases
from gpuflow.artifacts.partial import file_digest
from gpuflow.artifacts.plain_files import plain_files
from gpuflow.artifacts.references import INLINE_BYTES, json_bytes, make_reference
from gpuflow.artifacts.several import several
from gpuflow.errors import ArtifactError
from gpuflow.private_files import open_new

MANIFEST_SCHEMA: Final = 1
#: Results of fewer bytes are digested one after the other: a thread costs more.
_FEW_BYTES: Final = 1 << 20
#: The SHA-256 of an empty file.
_OF_NOTHING: Final = hashlib.sha256().hexdigest()
#: Folders that are packed, so that other stages can fetch them.
_PACKED_FOLDERS: Final = ("final_model", "final_lora", "final_index")
#: Folder of an attempt that holds the large fields of its result.
RESULT_FOLDER: Final = "result"
_FIELD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
#: Room for the names of the fields and the references themselves, in bytes.
_OWN_BYTES: Final = 64 << 10
#: A smaller field stays: to refer to it would save nothing.
_LEAST_FIELD_BYTES: Final = 4 << 10
#: Folders of an attempt that are no results.
_WORKING_FOLDERS: Final = frozenset({"checkpoints", "work"})


@dataclass(frozen=True, kw_only=True)
class SealedResults:
    """The result value with the places of its archives, the SHA-256 of the manifest, its names and their bytes."""

    result: dict[str, Any]
    digest: str
    names: tuple[str, ...]
    total_bytes: int = 0


def seal_results(
    folder: Path,
    result: Mapping[str, Any],
    declared: Iterable[str],
    spec: Mapping[str, Any],
    url_of: Callable[[str], str] | None = None,
) -> SealedResults:
    """Complete the results in `folder` and describe them; `url_of` gives the URL by which others fetch a file of it.

    `declared` are the names that the child declared; those that `output.artifacts` asks for are added, and a missing
    one is marked in the manifest and listed in the result. `output.aliases` are written as copies, and
    `postprocess.jsonl_export` as a file. responses.json has all of the result; in the value that is returned, the
    largest fields are references to files of their own until it is below INLINE_BYTES. Raises ArtifactError for a
    responses.json that is not JSON, OSError from the disk.
    """
    value = dict(result)
    value["result_dir"] = str(folder)
    for name in _PACKED_FOLDERS:
        kind = _kind(folder / name)
        if stat.S_ISLNK(kind):
            raise ArtifactError(f"the executor left {name!r}, which is a link; let it write the folder itself")
        if stat.S_ISDIR(kind):
            archive = folder / f"{name}.tar.gz"
            pack(folder / name, archive)
            value[f"{name}_path"] = str(folder / name)
            value[f"{name}_archive"] = str(archive)
            value[f"{name}_archive_url"] = archive.as_uri() if url_of is None else url_of(archive.name)
    export = (spec.get("postprocess") or {}).get("jsonl_export")
    if export:
        value["jsonl_export"] = export_rows(folder, value, export, url_of)
    responses = folder / "responses.json"
    kind = _kind(responses)
    if not kind:
        write_json(responses, value)
    elif stat.S_ISREG(kind):
        _check_json(responses)
    else:
        raise ArtifactError(
            f"the executor left {responses.name!r}, which is a link or no file; let it write the file itself"
        )
    value = _slim(value, folder, url_of)
    output = spec.get("output") or {}
    write_aliases(folder, output.get("aliases") or {})
    wanted = [*declared, *(output.get("artifacts") or [])]
    manifest: dict[str, Any] = {"schema": MANIFEST_SCHEMA, "artifacts": list(_entries(folder, wanted))}
    missing = [entry["name"] for entry in manifest["artifacts"] if "missing" in entry]
    if missing:
        value["missing_artifacts"] = missing
    content = json.dumps(manifest, ensure_ascii=False, indent=2).encode()
    with _written_whole(folder / "manifest.json") as file:
        file.write(content)
    names = tuple(entry["name"] for entry in manifest["artifacts"] if "missing" not in entry)
    total_bytes = sum(entry.get("bytes", 0) for entry in manifest["artifacts"])
    digest = hashlib.sha256(content).hexdigest()
    return SealedResults(result=value, digest=digest, names=names, total_bytes=total_bytes)


def digests_in(manifest: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that a sealed manifest describes, by their names. Raises OSError."""
    entries = json.loads(manifest.read_bytes())["artifacts"]
    return {entry["name"]: entry["sha256"] for entry in entries if "sha256" in entry and entry["name"] != manifest.name}


def _slim(value: dict[str, Any], folder: Path, url_of: Callable[[str], str] | None) -> dict[str, Any]:
    """Return the result with its largest fields as references, until its JSON is small enough."""
    if len(json_bytes(value)) <= INLINE_BYTES:
        return value
    fields = {name: json_bytes(item) for name, item in value.items()}
    left = sum(map(len, fields.values()))
    slim = dict(value)
    for number, (name, content) in enumerate(sorted(fields.items(), key=lambda field: -len(field[1]))):
        if left <= INLINE_BYTES - _OWN_BYTES or len(content) <= _LEAST_FIELD_BYTES:
            break
        file = _field_file(folder, name if _FIELD.fullmatch(name) else f"field-{number}")
        with open_new(file) as stream:
            stream.write(content)
        url = file.as_uri() if url_of is None else url_of(file.relative_to(folder).as_posix())
        slim[name] = make_reference(value[name], content, url)
        left -= len(content)
    return slim


def _field_file(folder: Path, name: str) -> Path:
    """Return the file of a field; nothing of the executor's is written over. Raises ArtifactError."""
    place = folder / RESULT_FOLDER
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise ArtifactError(f"the executor left {RESULT_FOLDER!r}, which is no folder; let it write to another name")
    place.mkdir(exist_ok=True)
    numbered = (f"{name}-{number}" for number in itertools.count(1))
    return next(
        path
        for path in (place / f"{one}.json" for one in itertools.chain([name], numbered))
        if not os.path.lexists(path)
    )


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one. Raises OSError."""
    with _written_whole(path) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8")
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.detach()


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[BinaryIO]:
    """Open what takes the place of a file when the block is over, and is on the disk then. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    with open_new(fresh) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _kind(path: Path) -> int:
    """Return the mode of what is there, of a link itself; 0 where nothing is. Raises OSError."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path.name} is not JSON: {error}; the executor must write one JSON document") from error


def _entries(folder: Path, wanted: Iterable[str]) -> Iterable[dict[str, Any]]:
    paths = sorted(path for path in plain_files(folder) if _is_result(path.relative_to(folder)))
    sizes = [path.stat().st_size for path in paths]
    at_once = sum(sizes) < _FEW_BYTES
    filled = [path for path, size in zip(paths, sizes, strict=True) if size]
    taken = map(file_digest, filled) if at_once else several(lambda path, _: file_digest(path), filled)
    digest_of = dict(zip(filled, taken, strict=True))
    digests = [digest_of.get(path, _OF_NOTHING) for path in paths]
    names = [str(path.relative_to(folder)) for path in paths]
    for name, size, digest in zip(names, sizes, digests, strict=True):
        yield {"name": name, "bytes": size, "sha256": digest}
    for name in dict.fromkeys(str(item) for item in wanted):
        if name not in names and not any(other.startswith(f"{name}/") for other in names):
            yield {"name": name, "missing": True}


def _is_result(inside: Path) -> bool:
    return not inside.parts[0].startswith(".") and inside.parts[0] not in _WORKING_FOLDERS
