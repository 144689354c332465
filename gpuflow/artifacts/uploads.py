"""What is on its way into the fleet: local files of `data.upload`, folders of documents and the programs of commands
are stored once, by digest, and become URLs.

Called by the client alone, for a template that its user has written: whoever takes templates from others (the gateway)
refuses `upload` instead, or they would name files of the server. Everything is checked before anything is sent.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gpuflow.artifacts.archive import pack
from gpuflow.artifacts.data_files import DOCUMENTS
from gpuflow.artifacts.partial import file_digest
from gpuflow.artifacts.references import UPLOADS
from gpuflow.artifacts.store import Progress, Store
from gpuflow.errors import InvalidTemplate
from gpuflow.spec import Mistake, Template
from gpuflow.spec.references import references_in
from gpuflow.spec.report import Check, Findings, invalid, path_text
from gpuflow.spec.report import Path as SpecPath

#: Gives the progress callback of a file of that name and size while it is sent.
Bar = Callable[[str, int], AbstractContextManager[Progress | None]]

NO_STORE: Final = (
    "the broker is on another machine and the fleet has no store; set GPUFLOW_STORE_URL to one that clients and "
    "workers reach: file:///shared/folder, http://gateway:8080/api/v1/results or s3://bucket/prefix"
)
#: What of a project folder is not sent, wherever it lies in it.
NOT_SENT: Final = frozenset(
    {
        ".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".tox", ".nox", ".mypy_cache", ".pytest_cache",
        ".ruff_cache", ".ipynb_checkpoints", "node_modules", ".DS_Store",
    }
)  # fmt: skip
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


#: Fields of a command that name what is brought.
_BROUGHT: Final = ("upload", "project")


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """Where a file lies now, and its SHA-256."""

    url: str
    sha256: str

    @property
    def fragment_url(self) -> str:
        """The URL with its digest, where there is room for one value only."""
        return f"{self.url}#sha256={self.sha256}"


def upload_places(template: Template) -> Iterator[tuple[SpecPath, str]]:
    """Yield (path, value) of every `upload` below `data` and `search.documents`, and of what a command brings.

    In stages and their matrices.
    """
    for stage in template.stages:
        top: SpecPath = ("spec", "stages", stage.name) if template.is_pipeline else ("spec",)
        yield from _in_data(stage.spec.get("data"), (*top, "data"))
        yield from _in_data(_documents(stage.spec), (*top, "search", "documents"))
        yield from _in_command(stage.spec.get("command"), (*top, "command"))
        for name, values in (stage.matrix or {}).items():
            for index, value in enumerate(values if isinstance(values, list) else ()):
                path = (*top, "matrix", name, index)
                if name in ("data.upload", "data.eval_split.upload", "command.upload", "command.project"):
                    yield path, str(value)
                elif name == "command":
                    yield from _in_command(value, path)
                elif name in ("data", "data.eval_split"):
                    yield from _in_data(value, path)


def _in_data(data: Any, path: SpecPath) -> Iterator[tuple[SpecPath, str]]:
    if isinstance(data, Mapping):
        if isinstance(data.get("upload"), str):
            yield (*path, "upload"), data["upload"]
        yield from _in_data(data.get("eval_split"), (*path, "eval_split"))


def _documents(spec: Mapping[str, Any]) -> Any:
    search = spec.get("search")
    return search.get("documents") if isinstance(search, Mapping) else None


def _in_command(command: Any, path: SpecPath) -> Iterator[tuple[SpecPath, str]]:
    if isinstance(command, Mapping):
        yield from (((*path, name), command[name]) for name in _BROUGHT if isinstance(command.get(name), str))


def refuse_uploads(template: Template) -> None:
    """Raise InvalidTemplate for a template with `upload`, which only its author's own machine can send."""
    found = [
        Mistake(path=path_text(path), message="names a file of the one who submits; give data.url, or data.path")
        for path, _ in upload_places(template)
    ]
    if found:
        raise invalid(template.source, found)


def upload_checks(source: object) -> dict[str, Check]:
    """Return section of a spec -> what says whether the local files that it names can be sent, for `templates.parse`.

    Paths are relative to the folder of `source`, where that is the path of a template, else to the current folder. So a
    missing file stands in one report with all other mistakes, with its line. For those who may send local files.
    """
    is_file = isinstance(source, str | os.PathLike) and os.path.isfile(source)  # noqa: PTH113  (any text may come)
    folder = Path(str(source)).parent if is_file else Path()

    def looked_up(places: Iterator[tuple[SpecPath, str]], folders: set[str]) -> Iterator[tuple[SpecPath, str]]:
        for path, value in places:
            found = Findings()
            _place(value, folder, path, found, folders)
            yield from ((path, one.message) for one in found.mistakes)

    return {
        "data": lambda data: looked_up(_in_data(data, ()), {*_folders({"data": data})}),
        "search": lambda search: looked_up(
            _in_data(_documents({"search": search}), ("documents",)), {*_folders({"search": search})}
        ),
        "command": lambda command: looked_up(_in_command(command, ()), set()),
    }


def checked_uploads(template: Template) -> dict[str, Path]:
    """Return the file or folder of every `upload` and `project`, by what the template calls it.

    Paths are relative to the folder of the template's file, else to the current folder. Raises InvalidTemplate for what
    cannot be sent: no file, an empty one, one that may not be read.
    """
    file = Path(template.source)
    folder = file.parent if file.is_file() else Path()
    findings = Findings()
    files: dict[str, Path] = {}
    folders = {value for stage in template.stages for value in _folders(stage.spec)}
    for path, value in upload_places(template):
        files[value] = _place(value, folder, path, findings, folders)
    findings.raise_if_any(template.source)
    return files


def with_uploads(template: Template, open_store: Callable[[], Store | None], bar: Bar) -> Template:
    """Return the template with every uploaded file stored, and `url` and `sha256` in place of `upload` or `project`.

    Paths are relative to the folder of the template's file, else to the current folder. Raises InvalidTemplate before
    anything is sent, for files that cannot be sent or when there is no store; ArtifactError while they are sent.
    """
    files = checked_uploads(template)
    if not files:
        return template
    store = open_store()
    if store is None:
        first = next(path for path, _ in upload_places(template))
        raise invalid(template.source, [Mistake(path=path_text(first), message=f"cannot be sent: {NO_STORE}")])
    sent = {value: _send(source, store, bar) for value, source in files.items()}
    stages = tuple(
        replace(stage, spec=_with_data(stage.spec, sent, stage.matrix), matrix=_matrix(stage.matrix, sent))
        for stage in template.stages
    )
    return replace(template, spec=_with_data(template.spec, sent, None), stages=stages)


def _folders(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the uploads of a spec that may be folders: those of documents."""
    for data in (spec.get("data"), _documents(spec)):
        if isinstance(data, Mapping) and data.get("type") == DOCUMENTS and isinstance(data.get("upload"), str):
            yield data["upload"]


def _name(path: SpecPath) -> str:
    """Return the field that a place stands in: the last name of it, or of the matrix that it is in."""
    return str(next(part for part in reversed(path) if isinstance(part, str))).rpartition(".")[2]


def _place(value: str, folder: Path, path: SpecPath, findings: Findings, folders: set[str]) -> Path:
    """Return the file or folder of one place; `folders` are the values that may be one. Notes what is wrong with it."""
    is_folder = _name(path) == "project" or (value in folders and (folder / Path(value).expanduser()).is_dir())
    return _project(value, folder, path, findings) if is_folder else _file(value, folder, path, findings)


def _project(value: str, folder: Path, path: SpecPath, findings: Findings) -> Path:
    """Return the folder of one `project`; notes what is wrong with it."""
    place = (folder / Path(value).expanduser()).absolute()
    if "${" in value and any(True for _ in references_in(value)):
        findings.add(path, "holds a reference; a folder is sent at submit, so name it by its path")
    elif not place.is_dir():
        findings.add(path, f"is {value!r}, but {place} is no folder here; correct the path")
    elif not place.name or place == Path.home():
        findings.add(path, f"is {value!r}, all of {place}; name the folder of one project")
    return place


def _file(value: str, folder: Path, path: SpecPath, findings: Findings) -> Path:
    """Return the file of one `upload`; notes what is wrong with it."""
    place = folder / Path(value).expanduser()
    if "${" in value and any(True for _ in references_in(value)):
        findings.add(path, "holds a reference; a file is sent at submit, so name it by its path")
        return place
    try:
        if place.is_dir():
            findings.add(path, f"is {value!r}, a folder ({place.absolute()}); name one file in it")
        elif not place.is_file():
            findings.add(path, f"is {value!r}, but {place.absolute()} is no file here; correct the path")
        elif place.stat().st_size == 0:
            findings.add(path, f"is {value!r}, but {place.absolute()} is empty; give a file with rows")
        elif not os.access(place, os.R_OK):
            findings.add(path, f"is {value!r}, but {place.absolute()} cannot be read; give yourself the right to it")
    except (OSError, ValueError) as error:
        findings.add(path, f"is {value!r}, which cannot be read: {error}; correct the path")
    return place


def _send(source: Path, store: Store, bar: Bar) -> Uploaded:
    if source.is_dir():
        with tempfile.TemporaryDirectory(prefix="gpuflow-project-") as made:
            archive = Path(made, f"{_UNSAFE.sub('_', source.name)[:80].strip('._-') or 'project'}.tar.gz")
            pack(source, archive, leave_out=NOT_SENT)
            return _send(archive, store, bar)
    digest = file_digest(source)
    with bar(source.name, source.stat().st_size) as progress:
        stored = store.put(source.resolve(), f"{UPLOADS}/{digest}/{_safe_name(source)}", progress=progress)
    if stored.sha256 != digest:
        raise InvalidTemplate(f"{source} changed while it was sent; submit again when nobody writes to it")
    return Uploaded(url=stored.url, sha256=digest)


def _safe_name(source: Path) -> str:
    """Return a name that every store takes, with the suffix of the file."""
    suffix = ".tar.gz" if source.name.endswith(".tar.gz") else _UNSAFE.sub("", source.suffix)[:20].lower()
    return (
        _UNSAFE.sub("_", source.name.removesuffix(".tar.gz") if suffix == ".tar.gz" else source.stem)[:80].strip("._-")
        or "data"
    ) + suffix


def _with_data(spec: dict[str, Any], sent: Mapping[str, Uploaded], matrix: Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(spec.get("command"), dict):
        command = _command(spec["command"], sent)
        if matrix and not {"command.upload", "command.project"}.isdisjoint(matrix):  # each variant brings its own
            command = {key: value for key, value in command.items() if key not in ("url", "sha256")}
        spec = {**spec, "command": command}
    documents = _documents(spec)
    if isinstance(documents, dict):
        spec = {**spec, "search": {**spec["search"], "documents": _data(documents, sent)}}
    data = spec.get("data")
    if not isinstance(data, dict):
        return spec
    fresh = _data(data, sent)
    if matrix and "data.upload" in matrix:  # which gives each variant its own
        fresh = {key: value for key, value in fresh.items() if key not in ("url", "sha256")}
    if matrix and "data.eval_split.upload" in matrix and isinstance(fresh.get("eval_split"), dict):
        fresh["eval_split"] = {}
    return {**spec, "data": fresh}


def _data(data: Mapping[str, Any], sent: Mapping[str, Uploaded]) -> dict[str, Any]:
    fresh = dict(data)
    uploaded = sent.get(fresh["upload"]) if isinstance(fresh.get("upload"), str) else None
    if uploaded is not None:
        del fresh["upload"]
        fresh.update(url=uploaded.url, sha256=uploaded.sha256)
    if isinstance(fresh.get("eval_split"), Mapping):
        fresh["eval_split"] = _data(fresh["eval_split"], sent)
    return fresh


def _command(command: Mapping[str, Any], sent: Mapping[str, Uploaded]) -> dict[str, Any]:
    fresh = dict(command)
    for name in _BROUGHT:
        uploaded = sent.get(fresh[name]) if isinstance(fresh.get(name), str) else None
        if uploaded is not None:
            del fresh[name]
            fresh.update(url=uploaded.url, sha256=uploaded.sha256)
    return fresh


def _matrix(matrix: dict[str, list[Any]] | None, sent: Mapping[str, Uploaded]) -> dict[str, list[Any]] | None:
    if matrix is None:
        return None
    fresh: dict[str, list[Any]] = {}
    for name, values in matrix.items():
        if name in ("data.upload", "data.eval_split.upload") and isinstance(values, list):
            fresh[f"{name.removesuffix('upload')}url"] = [sent[str(value)].fragment_url for value in values]
        elif name in ("command.upload", "command.project") and isinstance(values, list):
            fresh["command.url"] = [sent[str(value)].fragment_url for value in values]
        elif name == "command" and isinstance(values, list):
            fresh[name] = [_command(value, sent) if isinstance(value, Mapping) else value for value in values]
        elif name in ("data", "data.eval_split") and isinstance(values, list):
            fresh[name] = [_data(value, sent) if isinstance(value, Mapping) else value for value in values]
        else:
            fresh[name] = values
    return fresh
