"""The data files of a task become files of this machine: `data.url` is fetched into the cache.

Called by `inputs`. A file with a digest is fetched once; one without is asked for again by each task, as it may have
changed. Ids of hub data sets are not URLs of files and stay what they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urlsplit

from gpuflow.artifacts.destination import FetchFailed, store_token
from gpuflow.artifacts.marking import mark_used
from gpuflow.artifacts.partial import disk_errors, file_digest
from gpuflow.artifacts.reading import fetch
from gpuflow.artifacts.store import file_url_path, shown_url
from gpuflow.artifacts.task_access import current_roots, note_brought
from gpuflow.errors import ArtifactError
from gpuflow.policy.roots import opened
from gpuflow.settings import Settings
from gpuflow.spec.references import is_pending

_FILE_TYPES: Final = frozenset({"jsonl", "csv", "parquet"})
#: Data that is a file, or a folder that travels as an archive.
DOCUMENTS: Final = "documents"
_SCHEMES: Final = frozenset({"file", "http", "https", "s3"})
_FRAGMENT: Final = re.compile(r"sha256=([0-9a-fA-F]{64})")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def local_data(data: Mapping[str, Any], settings: Settings, where: str = "data") -> dict[str, Any]:
    """Return a `data` section whose files, those of `eval_split` too, are paths here. Raises ArtifactError, OSError."""
    local = _local(data, str(data.get("type") or "jsonl"), settings, where)
    if isinstance(local.get("eval_split"), Mapping):
        kind = str(data.get("type") or "jsonl")
        local["eval_split"] = _local(local["eval_split"], kind, settings, f"{where}.eval_split")
    return local


def _local(data: Mapping[str, Any], kind: str, settings: Settings, where: str) -> dict[str, Any]:
    local = dict(data)
    if local.get("upload"):
        raise ArtifactError(
            f"{where}.upload was not sent: submit the task by gpuflow.submit() or `gpuflow submit` where the file is"
        )
    url = local.get("url")
    # A URL with ${env:...} is known in the child alone, which fetches it.
    if kind not in {*_FILE_TYPES, DOCUMENTS} or not isinstance(url, str) or is_pending(url, at_dispatch=True):
        return local
    if urlsplit(url).scheme not in _SCHEMES:
        return local
    local["path"] = str(local_file(url, local.pop("sha256", None), settings))
    del local["url"]
    return local


def local_file(url: str, sha256: str | None, settings: Settings) -> Path:
    """Return the file of a URL on this machine, fetched once where its digest is known. Raises ArtifactError, OSError.

    The digest may stand in the URL's fragment, `#sha256=...`.
    """
    bare, fragment = urldefrag(url)
    found = _FRAGMENT.fullmatch(fragment)
    if found:
        url, sha256 = bare, sha256 or found[1]
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _file_here(url, sha256)
    if settings.offline:
        raise ArtifactError(f"{shown_url(url)} is not fetched: this worker is offline; give data.path")
    name = _UNSAFE.sub("_", unquote(parts.path).rpartition("/")[2])[-100:].strip("._-") or "data"
    key = sha256.lower() if sha256 else f"url-{hashlib.sha256(url.encode()).hexdigest()}"
    target = settings.cache_dir / "data" / key / name
    target.parent.mkdir(parents=True, exist_ok=True)
    mark_used(target.parent)
    try:
        fetch(url, target, settings=settings, sha256=sha256, token=store_token(url, settings))
    except ArtifactError as error:
        raise FetchFailed(str(error)) from error
    return note_brought(target)


def readable_file(url: str) -> Path | None:
    """Return the real path of a file: URL, None where no file is. Raises NotAllowed for one outside of the roots."""
    try:
        with opened(file_url_path(url), current_roots(), field=shown_url(url)) as found:
            return found.real if found.is_file else None
    except OSError:
        return None


def _file_here(url: str, sha256: str | None) -> Path:
    path = readable_file(url)
    if path is None:
        path = file_url_path(url)
        raise ArtifactError(
            f"{path} is not on this machine; set GPUFLOW_STORE_URL to a store that all machines reach, the same on "
            "clients and workers, or put the file there"
        )
    if sha256:
        with disk_errors(f"{path} cannot be read"):
            digest = file_digest(path)
        if digest != sha256.lower():
            raise ArtifactError(f"{path} is not what was stored: its SHA-256 is {digest}, not {sha256}; submit again")
    return path
