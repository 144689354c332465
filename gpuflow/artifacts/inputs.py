"""Brings the inputs of a task to this machine: models, adapters, projects become local folders, data local files.

Called by the supervisor before the child starts, so that an executor sees local paths and plain values alone, and needs
neither network nor keys. Archives are unpacked once into the cache, under their digest; references are loaded.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from gpuflow.artifacts.data_files import DOCUMENTS, local_data
from gpuflow.artifacts.destination import bearer_token, store_token
from gpuflow.artifacts.marking import mark_used
from gpuflow.artifacts.placeholders import filled, hiding
from gpuflow.artifacts.program_files import ARCHIVES, local_program
from gpuflow.artifacts.reading import fetch, unpack
from gpuflow.artifacts.references import References
from gpuflow.artifacts.store import file_url_path, shown_url
from gpuflow.artifacts.task_access import current_roots, note_brought
from gpuflow.errors import ArtifactError
from gpuflow.filelocks import holding
from gpuflow.policy.paths import judge_paths
from gpuflow.policy.roots import Opened, opened
from gpuflow.settings import Settings
from gpuflow.spec.references import UnresolvedReference, shield

_REMOTE: Final = frozenset({"http", "https", "s3"})


@dataclass(frozen=True, kw_only=True)
class LocalInputs:
    """A spec without references, whose adapters and data are local, and the local folder of `checkpoint.load`."""

    spec: dict[str, Any]
    checkpoint_path: str | None


def localize(
    spec: Mapping[str, Any], *, settings: Settings, environment: Mapping[str, str] | None = None
) -> LocalInputs:
    """Fetch and unpack what `spec` loads; `environment` are the values of `${env:NAME}` in what this process reads.

    Raises ArtifactError, UnresolvedReference, OSError.
    """
    with hiding(spec, environment):
        return _localized(spec, settings, environment)


def _localized(spec: Mapping[str, Any], settings: Settings, environment: Mapping[str, str] | None) -> LocalInputs:
    # What is loaded is data: the child finds nothing to replace in it.
    local: dict[str, Any] = References(settings).everywhere(copy.deepcopy(dict(spec)), shield)
    roots = current_roots()
    if roots is not None:
        judge_paths(local, roots, lambda text: _known(text, environment))
    if isinstance(local.get("data"), dict):
        local["data"] = _data(local["data"], settings, "data")
    if isinstance(local.get("search"), dict):
        local["search"] = _search(local["search"], settings, environment)
    if isinstance(local.get("command"), dict):
        local["command"] = local_program(local["command"], settings, lambda file: _unpacked(file, settings.cache_dir))
    for adapter in (local.get("model") or {}).get("adapters") or []:
        address = adapter.pop("url", None) or adapter.get("path")
        if address:
            adapter["path"] = str(_folder(filled(str(address), environment), settings, where="model.adapters"))
    if isinstance(local.get("reward_model"), dict):
        local["reward_model"] = _reward(local["reward_model"], settings, environment)
    load = (local.get("checkpoint") or {}).get("load")
    checkpoint = str(_loaded(load, settings, environment, "checkpoint.load")) if load else None
    return LocalInputs(spec=local, checkpoint_path=checkpoint)


def _known(text: str, environment: Mapping[str, str] | None) -> str:
    """Return a text filled as far as is known here; of a name that nobody knows, the child complains."""
    try:
        return str(filled(text, environment))
    except UnresolvedReference:
        return text


def _data(data: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
    """Return a `data` section with local files; documents that came as an archive are a folder."""
    local = local_data(data, settings, where)
    if data.get("url") and local.get("path") and local.get("type") == DOCUMENTS:
        file = Path(local["path"])
        local["path"] = str(_unpacked(file, settings.cache_dir) if file.name.endswith(ARCHIVES) else file)
    return local


def _search(search: Mapping[str, Any], settings: Settings, environment: Mapping[str, str] | None) -> dict[str, Any]:
    """Return a `search` section whose index and documents are local."""
    local = dict(search)
    if isinstance(local.get("index"), Mapping):
        local["index"] = {"path": str(_loaded(local["index"], settings, environment, "search.index"))}
    if isinstance(local.get("documents"), Mapping):
        local["documents"] = _data(local["documents"], settings, "search.documents")
    return local


def _reward(section: Mapping[str, Any], settings: Settings, environment: Mapping[str, str] | None) -> dict[str, Any]:
    """Return a `reward_model` section whose archive, by `url` or `path`, is a folder of this machine."""
    local = {name: value for name, value in section.items() if name not in ("url", "headers")}
    if section.get("url"):
        load = {name: section[name] for name in ("url", "headers") if section.get(name)}
        local["path"] = str(_loaded(load, settings, environment, "reward_model"))
    elif section.get("path"):
        path = Path(filled(str(section["path"]), environment)).expanduser()
        with contextlib.suppress(FileNotFoundError), opened(path, current_roots(), field="reward_model.path") as found:
            if found.is_file:
                local["path"] = str(_unpacked(found, settings.cache_dir))
    return local


def _loaded(load: Mapping[str, Any], settings: Settings, environment: Mapping[str, str] | None, where: str) -> Path:
    """Return the local folder of what `url` or `path` names, fetched with the token of its headers."""
    load = filled(dict(load), environment)
    address = load.get("url") or load.get("path")
    if not address:
        raise ArtifactError(f"{where} names neither `url` nor `path`; give one")
    return _folder(str(address), settings, bearer_token(load.get("headers"), where), where=where)


def _folder(address: str, settings: Settings, token: str | None = None, *, where: str) -> Path:
    """Return the local folder of a path or URL (file, http, https, s3); an archive is unpacked into the cache.

    `token` is the bearer token for a URL; the fleet's own store gets its own.
    """
    parts = urlsplit(address)
    if parts.scheme in _REMOTE:
        if settings.offline:
            raise ArtifactError(f"{shown_url(address)} is not fetched: this worker is offline; give a local path")
        name = Path(unquote(parts.path)).name or "checkpoint.tar.gz"
        return _fetched(address, name, settings, token or store_token(address, settings))
    if parts.scheme not in ("", "file"):
        raise ArtifactError(
            f"{shown_url(address)!r}: the scheme {parts.scheme!r} is not known; use a path, file:, http:, https: or s3:"
        )
    path = file_url_path(address) if parts.scheme == "file" else Path(address)
    try:
        with opened(path, current_roots(), field=where) as found:
            return found.real if found.is_folder else _unpacked(found, settings.cache_dir)
    except FileNotFoundError:
        raise ArtifactError(
            f"{path} is not on this machine; share RESULTS_DIR between the workers, or use output.destination"
        ) from None


def _fetched(url: str, name: str, settings: Settings, token: str | None) -> Path:
    """Return the folder of a remote archive; a fetch that broke off is gone on with, one process at a time."""
    place = settings.cache_dir / "fetched" / hashlib.sha256(url.encode()).hexdigest()
    place.mkdir(parents=True, exist_ok=True)
    with holding(place / ".lock"):
        fetched = place / name
        fetch(url, fetched, settings=settings, token=token)
        folder = _unpacked(fetched, settings.cache_dir)
        fetched.unlink()
    return folder


def _unpacked(archive: Path | Opened, cache_dir: Path) -> Path:
    source = archive.place if isinstance(archive, Opened) else archive
    digest = _sha256(source)
    target = cache_dir / "checkpoints" / digest
    if not mark_used(target):
        try:
            unpack(archive.real if isinstance(archive, Opened) else archive, target)
        except OSError:
            if not target.exists():
                raise
    note_brought(target)
    entries = list(target.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else target


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
