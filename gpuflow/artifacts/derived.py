"""Files that are made of a result once the child has ended: `output.aliases`, and `postprocess.jsonl_export`.

Used by `manifest`. The folder is the child's, who may have left links in it: none is followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gpuflow.errors import ArtifactError
from gpuflow.private_files import open_new

_PLACES: Final = ("metadata", "item")
#: Most values, and bytes, of one export: it is written by the worker, which has other work, and may repeat an item.
MOST_VALUES: Final = 10_000_000
MOST_BYTES: Final = 1 << 30


def write_aliases(folder: Path, aliases: Mapping[str, str]) -> None:
    """Give artifacts further names (hard links, else copies); a file that is there under such a name stays.

    Raises ArtifactError, OSError.
    """
    for name, original in aliases.items():
        source, target = _inside(folder, original), _inside(folder, name)
        if os.path.lexists(target) or not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            os.link(source, target, follow_symlinks=False)
            continue
        with source.open("rb") as reading, open_new(target) as writing:
            shutil.copyfileobj(reading, writing)


def export_rows(
    folder: Path, result: Mapping[str, Any], export: Mapping[str, Any], url_of: Callable[[str], str] | None
) -> dict[str, Any]:
    """Write one JSON line for each item of a result, and say where: path, url, record_count and fields.

    Raises ArtifactError for a result without items, and for a line that lacks a field that is required; OSError.
    """
    items = result.get("items")
    if not isinstance(items, list):
        raise ArtifactError("postprocess.jsonl_export has nothing to write: the result has no items")
    target = _inside(folder, str(export["path"]))
    if os.path.lexists(target):
        raise ArtifactError(
            f"postprocess.jsonl_export.path {export['path']!r} is a file of the task; give another name"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    required = list(export.get("required_fields") or ())
    if len(items) * len(export["fields"]) > MOST_VALUES:
        raise ArtifactError(f"postprocess.jsonl_export has more than {MOST_VALUES} values; export fewer fields")
    left = MOST_BYTES
    with open_new(target) as file:
        for index, item in enumerate(items):
            row = {name: _field(wanted, item) for name, wanted in export["fields"].items()}
            lacking = [name for name in required if _is_empty(row.get(name))]
            if lacking:
                raise ArtifactError(
                    f"postprocess.jsonl_export: item {index} has no {', '.join(lacking)}, which is required"
                )
            line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            left -= len(line)
            if left < 0:
                raise ArtifactError(f"postprocess.jsonl_export has more than {MOST_BYTES} bytes; export fewer fields")
            file.write(line)
    name = target.relative_to(folder).as_posix()
    url = target.as_uri() if url_of is None else url_of(name)
    return {"path": str(target), "url": url, "record_count": len(items), "fields": list(export["fields"])}


def _field(wanted: Any, item: Any) -> Any:
    """Return a field's value: by a place in the item, by `{from, key, fallback, default}`, or what is written."""
    if isinstance(wanted, str):
        place, dot, key = wanted.partition(".")
        if wanted in ("prompt", "output"):
            return _at(item, wanted, None)
        return _at(item, place, key) if dot and place in _PLACES else wanted
    if not isinstance(wanted, Mapping):
        return wanted
    source = wanted.get("from") or wanted.get("source") or "literal"
    value = wanted.get("value", wanted.get("literal")) if source == "literal" else _at(item, source, wanted.get("key"))
    for name in ("fallback", "default"):
        if _is_empty(value) and name in wanted:
            value = wanted[name]
    return value


def _at(item: Any, place: str, key: str | None) -> Any:
    if not isinstance(item, Mapping):
        return None
    metadata = item.get("metadata")
    found = {
        "prompt": item.get("input"),
        "output": item.get("output"),
        # FlowMesh's metadata hold the prompt too
        "metadata": {"prompt": item.get("input"), **(metadata if isinstance(metadata, Mapping) else {})},
        "item": item,
    }.get(place)
    return found if not key else found.get(key) if isinstance(found, Mapping) else None


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file of the folder. Raises ArtifactError where a link is on the way."""
    for part in _steps(folder, name):
        if part.is_symlink():
            raise ArtifactError(f"{name!r} leads through a link that the task has left; let it write the file itself")
    return folder / name


def _steps(folder: Path, name: str) -> Iterator[Path]:
    at = folder
    for part in Path(name).parts:
        at = at / part
        yield at
