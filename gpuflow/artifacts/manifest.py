"""Seals the folder of an attempt: archives, responses.json, manifest.json. After that it is never written again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpuflow.artifacts.archive import pack
from gpuflow.errors import ArtifactError

MANIFEST_SCHEMA: Final = 1
_MODEL_FOLDERS: Final = ("final_model", "final_lora")
#: Folders of an attempt that are no results.
_WORKING_FOLDERS: Final = frozenset({"checkpoints"})


@dataclass(frozen=True, kw_only=True)
class SealedResults:
    """The result value with the places of its archives, the SHA-256 of the manifest, and the names in it."""

    result: dict[str, Any]
    digest: str
    names: tuple[str, ...]


def seal_results(
    folder: Path,
    result: Mapping[str, Any],
    declared: Iterable[str],
    spec: Mapping[str, Any],
    url_of: Callable[[str], str] | None = None,
) -> SealedResults:
    """Complete the results in `folder` and describe them; `url_of` gives the URL by which others fetch a file of it.

    `declared` are the names that the child declared; those that `output.artifacts` asks for are added, and a missing
    one is marked in the manifest. Raises ArtifactError for a responses.json that is not JSON, OSError from the disk.
    """
    value = dict(result)
    value["result_dir"] = str(folder)
    for name in _MODEL_FOLDERS:
        if (folder / name).is_dir():
            archive = folder / f"{name}.tar.gz"
            pack(folder / name, archive)
            value[f"{name}_path"] = str(folder / name)
            value[f"{name}_archive"] = str(archive)
            value[f"{name}_archive_url"] = archive.as_uri() if url_of is None else url_of(archive.name)
    responses = folder / "responses.json"
    if responses.exists():
        _check_json(responses)
    else:
        write_json(responses, value)
    wanted = [*declared, *((spec.get("output") or {}).get("artifacts") or [])]
    manifest: dict[str, Any] = {"schema": MANIFEST_SCHEMA, "artifacts": list(_entries(folder, wanted))}
    path = folder / "manifest.json"
    write_json(path, manifest)
    names = tuple(entry["name"] for entry in manifest["artifacts"] if "missing" not in entry)
    return SealedResults(result=value, digest=hashlib.sha256(path.read_bytes()).hexdigest(), names=names)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path.name} is not JSON: {error}; the executor must write one JSON document") from error


def _entries(folder: Path, wanted: Iterable[str]) -> Iterable[dict[str, Any]]:
    found = set()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if (
            path.is_dir()
            or path.is_symlink()
            or name.startswith(".")
            or path.parts[len(folder.parts)] in _WORKING_FOLDERS
        ):
            continue
        found.add(name)
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        yield {"name": name, "bytes": path.stat().st_size, "sha256": digest}
    for name in dict.fromkeys(str(item) for item in wanted):
        if name not in found and not any(other.startswith(f"{name}/") for other in found):
            yield {"name": name, "missing": True}
