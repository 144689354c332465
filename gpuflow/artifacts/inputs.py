"""Brings the inputs of a task to this machine: checkpoints and adapters become local folders.

Called by the supervisor before the child starts, so that an executor sees local paths alone. Archives are unpacked
once into the cache, under their digest.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from gpuflow.artifacts.archive import unpack
from gpuflow.errors import ArtifactError

_BLOCK_BYTES: Final = 1 << 20
_TIMEOUT_SECONDS: Final = 60


@dataclass(frozen=True, kw_only=True)
class LocalInputs:
    """A spec whose adapters are local folders, and the local folder of `checkpoint.load`."""

    spec: dict[str, Any]
    checkpoint_path: str | None


def localize(spec: Mapping[str, Any], *, cache_dir: Path, results_dir: Path) -> LocalInputs:
    """Fetch and unpack what `spec` loads. Raises ArtifactError, OSError."""
    check_destination(spec)
    local = copy.deepcopy(dict(spec))
    for adapter in (local.get("model") or {}).get("adapters") or []:
        address = adapter.pop("url", None) or adapter.get("path")
        if address:
            adapter["path"] = str(_folder(str(address), cache_dir))
    load = (local.get("checkpoint") or {}).get("load")
    checkpoint = None
    if load:
        address = load.get("url") or load.get("path")
        if not address:
            raise ArtifactError("checkpoint.load names neither `url` nor `path`; give one")
        checkpoint = str(_folder(str(address), cache_dir))
    return LocalInputs(spec=local, checkpoint_path=checkpoint)


def check_destination(spec: Mapping[str, Any]) -> None:
    """Raise ArtifactError for an output destination that this version cannot write, before any work is done."""
    kind = ((spec.get("output") or {}).get("destination") or {}).get("type", "local")
    if kind != "local":
        raise ArtifactError(
            f"output.destination.type {kind!r} is not available in this version; "
            "use `local` with a RESULTS_DIR that all machines share"
        )


def _folder(address: str, cache_dir: Path) -> Path:
    """Return the local folder of a path, file: URL or http(s) URL; an archive is unpacked into the cache."""
    parts = urlsplit(address)
    if parts.scheme in ("http", "https"):
        with tempfile.TemporaryDirectory(prefix="gpuflow-fetch-") as folder:
            fetched = Path(folder) / (Path(unquote(parts.path)).name or "checkpoint.tar.gz")
            _download(address, fetched)
            return _unpacked(fetched, cache_dir)
    if parts.scheme not in ("", "file"):
        raise ArtifactError(
            f"{address!r}: the scheme {parts.scheme!r} is not known; use a path, file:, http: or https:"
        )
    path = Path(unquote(parts.path)) if parts.scheme == "file" else Path(address)
    if not path.exists():
        raise ArtifactError(f"{path} is not on this machine; share RESULTS_DIR between the workers, or give a URL")
    return path if path.is_dir() else _unpacked(path, cache_dir)


def _unpacked(archive: Path, cache_dir: Path) -> Path:
    digest = _sha256(archive)
    target = cache_dir / "checkpoints" / digest
    if not target.exists():
        try:
            unpack(archive, target)
        except OSError:
            if not target.exists():
                raise
    entries = list(target.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else target


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(url: str, target: Path) -> None:
    shown = url.split("?", 1)[0]
    try:
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer,  # noqa: S310  (http and https alone)
            target.open("wb") as file,
        ):
            shutil.copyfileobj(answer, file, _BLOCK_BYTES)
    except (urllib.error.URLError, TimeoutError) as error:
        raise ArtifactError(f"{shown} cannot be fetched: {error}") from error
