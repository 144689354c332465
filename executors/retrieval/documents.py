"""Reads the documents that a `data` section names: rows with text, or the text files of a folder. One at a time.

Documents are untrusted: files are bounded, have to be plain files below their folder, and errors name them. Imports no
ML library.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from executors import task_access
from executors.base import bad_input
from executors.data.sources import read_entries
from executors.vectors.texts import TEXT_COLUMNS
from gpuflow.protocol import Emitter

#: Most files of a folder that are read.
MAX_FILES: Final = 100_000
#: Largest document, in bytes of a file or characters of a row.
MAX_DOCUMENT_BYTES: Final = 64 << 20
#: Which files of a folder are documents where the task does not say.
DEFAULT_INCLUDE: Final = ("*.md", "*.markdown", "*.txt", "*.rst")
_MARKDOWN: Final = frozenset({".md", ".markdown"})
#: Columns of a row that tell where its text comes from, the first that is there.
_SOURCE_COLUMNS: Final = ("source", "path", "url", "id", "title")
#: Longest name of a source, in characters.
_MAX_SOURCE: Final = 1000
#: File names in a message.
_SHOWN: Final = 5


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and where it comes from: `source` is the path below its folder, or what its row says."""

    source: str
    text: str
    heading: str = ""
    is_markdown: bool = False


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents that are read one by one; `count` of them, where `read` skips none."""

    count: int
    read: Callable[[], Iterator[Document]]


def open_documents(data: Mapping[str, Any], cache_dir: str | None, emitter: Emitter) -> Documents:
    """Return the documents of a `data` section; files are listed at once and read later.

    Raises ExecutorError: BadInput naming what is wrong and where, while they are read too.
    """
    if data.get("type") == "documents":
        return _of_files(data, emitter)
    entries = read_entries(data, cache_dir, emitter)
    if not entries:
        raise bad_input("the task has no documents; give data.items, or a file or folder with text")
    column = (data.get("columns") or {}).get("text") or data.get("column")
    return Documents(
        count=len(entries),
        read=lambda: (_of_row(entry, index, column) for index, entry in enumerate(entries)),
    )


def _of_row(entry: Any, index: int, column: str | None) -> Document:
    where = f"document {index}"
    value, source, heading = entry, f"item-{index}", ""
    if isinstance(entry, Mapping):
        name = next((name for name in ([column] if column else TEXT_COLUMNS) if entry.get(name) is not None), None)
        if name is None:
            found = ", ".join(str(key) for key in list(entry)[:20]) or "none"
            raise bad_input(f"{where} has no {column or 'text'}; its columns are: {found}")
        value = entry[name]
        source = str(next((entry[key] for key in _SOURCE_COLUMNS if entry.get(key)), source))
        heading = str(entry.get("heading") or entry.get("title") or "")
    if not isinstance(value, str) or not value.strip():
        raise bad_input(f"{where} ({source[:100]}) has no text: it is {_kind(value)}; leave it out")
    if len(value) > MAX_DOCUMENT_BYTES:
        raise bad_input(
            f"{where} ({source[:100]}) has {len(value)} characters; the limit is {MAX_DOCUMENT_BYTES}: split it"
        )
    return Document(source=source[:_MAX_SOURCE], text=value, heading=heading[:_MAX_SOURCE])


def _kind(value: Any) -> str:
    return "blank" if isinstance(value, str) else type(value).__name__


def _of_files(data: Mapping[str, Any], emitter: Emitter) -> Documents:
    given = data.get("path")
    if not given:
        raise bad_input("data.type documents needs data.path, data.url or data.upload")
    root = task_access.folder(str(given), "data.path")
    if not root.exists():
        raise bad_input(f"{root} is not on this machine; check data.path, or send it by data.upload")
    if root.is_file():
        return Documents(count=1, read=lambda: iter((_of_file(root, root.name),)))
    patterns = tuple(data.get("include") or DEFAULT_INCLUDE)
    root = root.resolve()
    paths, outside = _list(root, patterns)
    if outside:
        names = ", ".join(outside[:_SHOWN])
        emitter.emit("log", message=f"{len(outside)} links lead out of {root.name} and are not read: {names}")
    if not paths:
        raise bad_input(f"{root} has no files that match {', '.join(patterns)}; set data.include")
    paths = paths[: data["max_items"]] if data.get("max_items") else paths
    return Documents(count=len(paths), read=lambda: (_of_file(path, source) for path, source in paths))


def _list(root: Path, patterns: Sequence[str]) -> tuple[list[tuple[Path, str]], list[str]]:
    """Return (file, its path below the root) in order, and the names of links that lead out of the root."""
    found: list[tuple[Path, str]] = []
    outside: list[str] = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            source = path.relative_to(root).as_posix()
            if name.startswith(".") or not any(fnmatch.fnmatch(source, pattern) for pattern in patterns):
                continue
            try:
                real = path.resolve(strict=True)
            except (OSError, RuntimeError):
                outside.append(source)
                continue
            if not real.is_relative_to(root):
                outside.append(source)
                continue
            found.append((real, source))
            if len(found) > MAX_FILES:
                raise bad_input(
                    f"{root} has more than {MAX_FILES} files that match {', '.join(patterns)}; narrow data.include"
                )
    return found, outside


def _of_file(path: Path, source: str) -> Document:
    """Read one file whole. Raises ExecutorError: BadInput for what is no text file of an allowed size."""
    try:
        raw = _read(path, source)
    except OSError as error:
        raise bad_input(f"{source} cannot be read: {error.strerror or error}; check its mode and data.path") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_input(f"{source} is not UTF-8: {error.reason} at byte {error.start}; convert it") from error
    if "\0" in text:
        raise bad_input(f"{source} is no text: it has zero bytes; leave it out by data.include")
    return Document(source=source[:_MAX_SOURCE], text=text, is_markdown=path.suffix.lower() in _MARKDOWN)


def _read(path: Path, source: str) -> bytes:
    """Return the bytes of a plain file; a pipe in its place is not waited for."""
    with (
        task_access.reading(path, "data.path") as found,
        os.fdopen(os.open(found.place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file,
    ):
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise bad_input(f"{source} is no plain file; leave it out by data.include")
        raw = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise bad_input(f"{source} is larger than {MAX_DOCUMENT_BYTES >> 20} MiB; split it, or leave it out")
    return raw
