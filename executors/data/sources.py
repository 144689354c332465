"""Reads the rows that the `data` section of a spec names: a list, a file, a shipped preset or a hub data set.

Every reader gives a list of mappings (a bare text becomes `{text: ...}` or the role that the caller names). Imports no
torch; `datasets` and `pyarrow` only for what needs them.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from executors import task_access
from executors.base import ExecutorError, bad_input
from executors.offline import not_here, offline
from gpuflow.protocol import Emitter

_TIMEOUT_SECONDS: Final = 60
_REDIRECTS: Final = 5
#: Longest cell of a csv file, in characters.
_MAX_CELL: Final = 16 * 1024 * 1024

Row = Mapping[str, Any]


def read_rows(data: Mapping[str, Any], cache_dir: str | None, emitter: Emitter, *, bare: str) -> list[Row]:
    """Return the rows of a `data` section, shuffled and cut as it says; a row that is bare text gets the key `bare`.

    Raises ExecutorError: BadInput naming what is wrong and where; OSError and URLError for files that cannot be read.
    """
    return as_rows(read_entries(data, cache_dir, emitter), bare=bare)


def as_rows(entries: Sequence[Any], *, bare: str) -> list[Row]:
    """Return entries as mappings. Raises ExecutorError: BadInput for an entry that is none, and for no entries."""
    rows = [_as_row(entry, index, bare) for index, entry in enumerate(entries)]
    if not rows:
        raise bad_input("the data has no rows; check data.path, data.split and data.max_items")
    return rows


def read_entries(data: Mapping[str, Any], cache_dir: str | None, emitter: Emitter) -> list[Any]:
    """Return the entries of a `data` section as they are, shuffled and cut as it says."""
    kind = data.get("type") or "list"
    if kind == "list":
        entries = list(data.get("items") or chats(data.get("messages") or []))
    elif kind in ("prompts", "preferences"):
        entries = list(data.get(kind) or ())
    elif kind in _FILES:
        entries = _read_file(data, kind)
    elif kind == "preset":
        from executors.data.presets import preset_rows

        entries = preset_rows(str(data.get("name")), cache_dir, emitter)
    elif kind == "dataset":
        from executors.data.hub import hub_rows

        entries = hub_rows(data, data.get("split") or "train")
    else:
        raise bad_input(f"data.type {kind!r} cannot be read here; use list, prompts, jsonl, csv, parquet or dataset")
    if data.get("shuffle"):
        random.Random(data.get("seed") or 0).shuffle(entries)  # noqa: S311
    return entries[: data["max_items"]] if data.get("max_items") else entries


def chats(messages: list[Any]) -> list[Any]:
    """Return a list of chats: one chat is a list of messages, several are a list of those."""
    return [{"messages": chat} for chat in messages] if _is_nested(messages) else [{"messages": messages}]


def _is_nested(messages: list[Any]) -> bool:
    return bool(messages) and all(isinstance(entry, list) for entry in messages)


def _as_row(entry: Any, index: int, bare: str) -> Row:
    if isinstance(entry, str):
        return {bare: entry}
    if isinstance(entry, list):
        return {"messages": entry}
    if isinstance(entry, Mapping):
        return entry
    raise bad_input(f"data row {index} is {type(entry).__name__}; a row is text, a list of messages, or a mapping")


def eval_entries(data: Mapping[str, Any]) -> list[Any]:
    """Return the entries of the file that `data.eval_split` names, which is of the data's own type."""
    kind = str(data.get("type") or "jsonl")
    if kind not in _FILES:
        raise bad_input(f"data.eval_split names a file, but the data is of type {kind!r}; give a share")
    return _read_file(data["eval_split"], kind)


def _read_file(data: Mapping[str, Any], kind: str) -> list[Any]:
    address = data.get("path") or data.get("url")
    if not address:
        raise bad_input(f"data.type {kind} needs data.path or data.url")
    parts = urlsplit(str(address))
    if parts.scheme in ("http", "https"):
        with tempfile.TemporaryDirectory(prefix="gpuflow-data-") as folder:
            path = Path(folder) / f"data{Path(unquote(parts.path)).suffix or f'.{kind}'}"
            _fetch(str(address), path)
            return _FILES[kind](path, path)
    path = Path(unquote(parts.path)) if parts.scheme == "file" else Path(str(address)).expanduser()
    try:
        with task_access.reading(path, "data.path") as found:
            if found.is_file:
                return _FILES[kind](path, found.place)
    except (FileNotFoundError, NotADirectoryError):
        pass
    raise bad_input(f"{path} is no file on this machine; check data.path, or send it by data.upload")


def _fetch(url: str, path: Path) -> None:
    if offline():
        raise ExecutorError("Offline", not_here(f"the data of {urlsplit(url).hostname}"))
    from email.message import Message
    from urllib.error import HTTPError

    from gpuflow.policy.connecting import client

    shown = str(urlsplit(url).hostname)
    options = {"timeout": _TIMEOUT_SECONDS, "follow_redirects": True, "max_redirects": _REDIRECTS}
    with (
        client(task_access.hosts(), headers={"Accept-Encoding": "identity"}, **options) as caller,
        caller.stream("GET", url) as answer,
        path.open("wb") as file,
    ):
        if answer.status_code >= 400:  # an error of httpx would show the query of the URL
            raise HTTPError(shown, answer.status_code, answer.reason_phrase, Message(), None)
        for block in answer.iter_raw(1 << 20):
            file.write(block)


# A reader is given the path that the task names, for messages, and the one by which the open file is read.


def _jsonl(path: Path, place: Path) -> list[Any]:
    whole = _json_list(path, place) if path.suffix.lower() == ".json" else None
    if whole is not None:
        return whole
    rows = []
    with place.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(_decoded(lines, path), start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise bad_input(f"{path.name} line {number} is not JSON: {error}; write one object a line") from error
    return rows


def _json_list(path: Path, place: Path) -> list[Any] | None:
    """Return the rows of a .json file that is one list, None for one with an object a line."""
    try:
        found = json.loads(place.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise bad_input(f"{path.name} is not UTF-8: {error}; convert it") from error
    except (ValueError, RecursionError):
        return None  # more than one value: the reader of lines says which of them is wrong
    return found if isinstance(found, list) else None


def _csv(path: Path, place: Path) -> list[Any]:
    csv.field_size_limit(_MAX_CELL)
    with place.open(encoding="utf-8-sig", newline="") as lines:
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        reader = csv.DictReader(_decoded(lines, path), restkey="", strict=True, delimiter=delimiter)
        try:
            rows = list(reader)
        except csv.Error as error:
            raise bad_input(f"{path.name} line {reader.line_num} is not csv: {error}") from error
    for number, row in enumerate(rows):
        if "" in row or None in row.values():
            raise bad_input(f"{path.name} row {number} has another number of cells than the head line")
    return list(rows)


def _decoded(lines: Any, path: Path) -> Any:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise bad_input(f"{path.name} is not UTF-8: {error}; convert it") from error


def _parquet(path: Path, place: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Any] = pyarrow.parquet.read_table(place).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise bad_input(f"{path.name} is not parquet: {error}") from error
    return rows


_FILES: Final[Mapping[str, Callable[[Path, Path], list[Any]]]] = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
