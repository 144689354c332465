"""The one interface of all artifact stores, and two ways in: `open_store` by a destination, `fetch` by a file's URL.

Called by the worker, the client and the gateway. The stores themselves live in `local_store`, `http_store` and
`s3_store`, each imported when it is used; nothing here knows how they work. Every store passes the same tests
(tests/integration/artifacts).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from gpuflow.artifacts.throttle import BLOCK_BYTES, Throttle, shared_throttle
from gpuflow.errors import ArtifactError
from gpuflow.policy.hosts import Hosts
from gpuflow.settings import Settings

__all__ = [
    "BLOCK_BYTES",
    "MAX_NAME_BYTES",
    "MAX_PART_BYTES",
    "RESERVED_PREFIX",
    "Progress",
    "Store",
    "StoredFile",
    "Throttle",
    "TooLarge",
    "check_name",
    "check_prefix",
    "fetch",
    "file_url_path",
    "open_store",
    "shown_url",
]

#: Called with the count of bytes that went over since the call before; what need not be sent again counts too.
Progress = Callable[[int], None]

MAX_NAME_BYTES: Final = 1024
MAX_PART_BYTES: Final = 255
#: What a store's own unfinished and side files begin with; no part of a name may.
RESERVED_PREFIX: Final = ".gpuflow-"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of a store: its size in bytes, its SHA-256 in hex, and the URL by which `fetch` gets it."""

    name: str
    size: int
    sha256: str
    url: str


class TooLarge(ArtifactError):
    """A file is larger than may be fetched."""


class Store(Protocol):
    """A place for files by name. Every method raises ArtifactError, with the file, the cause and the mend."""

    def put(self, source: Path, name: str, *, progress: Progress | None = None) -> StoredFile:
        """Store a file: streamed, visible only when whole, not sent again where the same content is there."""
        ...

    def get(
        self, name: str, target: Path, *, sha256: str | None = None, progress: Progress | None = None
    ) -> StoredFile:
        """Bring a file to `target`, which appears by rename; an interrupted one goes on from its .part."""
        ...

    def list(self, prefix: str) -> list[StoredFile]:
        """Return the file `prefix` and all below the folder `prefix` ("" for all), by name.

        `a` means `a` and `a/...`, never `ab`. sha256 is "" where the store cannot tell.
        """
        ...

    def delete(self, prefix: str) -> int:
        """Delete what `list` returns for `prefix`, and return how many files that were."""
        ...

    def url(self, name: str) -> str:
        """Return the URL by which others fetch a file; it holds no secret."""
        ...


def check_name(name: str) -> str:
    """Return `name` when it can name a file of a store; raise ArtifactError otherwise.

    A name is relative and "/"-separated, with no empty part, no "." and no "..", no backslash and no control
    characters; at most 1024 bytes of UTF-8, 255 a part.
    """
    cause = _fault(name)
    if cause:
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        raise ArtifactError(f"{shown!r} cannot name an artifact: {cause}; use a name such as task-1/responses.json")
    return name


def check_prefix(prefix: str) -> str:
    """Return a prefix without its last "/" when it is "", a name, or a name and "/"; raise ArtifactError otherwise."""
    return check_name(prefix.removesuffix("/")) if prefix else ""


def _fault(name: str) -> str | None:
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        return "it is not valid UTF-8"
    parts = name.split("/")
    if len(encoded) > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"it is longer than {MAX_NAME_BYTES} bytes, or one of its parts than {MAX_PART_BYTES}"
    if name.startswith("/"):
        return "it is absolute"
    if "" in parts:
        return "it is empty, or a part of it is"
    if "." in parts or ".." in parts:
        return "'.' and '..' lead to other folders"
    if "\\" in name or any(ord(char) < 32 or 127 <= ord(char) < 160 for char in name):
        return "it holds a backslash or a control character"
    if any(part.startswith(RESERVED_PREFIX) for part in parts):
        return f"{RESERVED_PREFIX!r} begins the names of the store's own files"
    return None


def shown_url(url: str) -> str:
    """Return a URL for a message: without user, password, query and fragment, which may hold secrets."""
    try:
        parts = urlsplit(url)
    except ValueError:  # no URL at all, such as http://[x
        scheme, mark, rest = re.split(r"[?#]", url, maxsplit=1)[0].rpartition("://")
        return f"{scheme}{mark}{rest.rpartition('@')[2]}"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def file_url_path(url: str) -> Path:
    """Return the path of a file: URL on this machine. Raises ArtifactError for another host or a relative path."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ArtifactError(f"{shown_url(url)!r} is not a URL: {error}; use file:///an/absolute/path") from None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ArtifactError(f"{shown_url(url)!r} names no path of this machine; use file:///an/absolute/path")
    path = unquote(parts.path)
    if "\0" in path:
        raise ArtifactError(f"{shown_url(url)!r} holds a null character; use file:///an/absolute/path")
    return Path(path)


def open_store(
    destination_url: str, *, settings: Settings, token: str | None = None, hosts: Hosts | None = None
) -> Store:
    """Return the store of a destination; nothing is connected to yet.

    file:///abs/path is a folder, http(s)://host/api/v1/results a results service (with `token` as its bearer token),
    s3://bucket/prefix a bucket. `hosts` is what an http(s) store may reach (None: everything).
    Raises ArtifactError for any other URL, for any but a folder where the settings say
    offline, or when the library it needs is missing.
    """
    throttle = shared_throttle(settings.worker_network_bandwidth_bytes_per_second)
    scheme = _scheme(destination_url, settings)
    if scheme == "file":
        from gpuflow.artifacts.local_store import LocalStore

        return LocalStore(file_url_path(destination_url), throttle=throttle)
    if scheme in ("http", "https"):
        from gpuflow.artifacts.http_store import HttpStore

        return HttpStore(destination_url, settings=settings, token=token, throttle=throttle, hosts=hosts)
    if scheme == "s3":
        from gpuflow.artifacts.s3_store import S3Store

        return S3Store(destination_url, throttle=throttle, max_bytes=settings.download_max_bytes)
    raise _unknown(destination_url, scheme)


def fetch(
    url: str,
    target: Path,
    *,
    settings: Settings,
    sha256: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    max_bytes: int | None = None,
    throttle: Throttle | None = None,
    hosts: Hosts | None = None,
) -> StoredFile:
    """Bring one file to `target` by its URL (file, http, https, s3), as `Store.get` does.

    Over a network at most `max_bytes` of it, and at most GPUFLOW_DOWNLOAD_MAX_BYTES. `hosts` is what may be
    reached by http(s) (None: everything). Raises ArtifactError, TooLarge, NotAllowed.
    """
    throttle = throttle or shared_throttle(settings.worker_network_bandwidth_bytes_per_second)
    most = min(max_bytes, settings.download_max_bytes) if max_bytes is not None else settings.download_max_bytes
    scheme = _scheme(url, settings)
    if scheme == "file":
        from gpuflow.artifacts.local_store import fetch_path

        return fetch_path(file_url_path(url), target, throttle=throttle, sha256=sha256, progress=progress)
    if scheme in ("http", "https"):
        from gpuflow.artifacts.http_store import fetch_http

        return fetch_http(
            url,
            target,
            settings=settings,
            throttle=throttle,
            sha256=sha256,
            token=token,
            progress=progress,
            max_bytes=most,
            hosts=hosts,
        )
    if scheme == "s3":
        from gpuflow.artifacts.s3_store import S3Store

        place, _, name = url.rpartition("/")
        return S3Store(place, throttle=throttle, max_bytes=most).get(
            unquote(name), target, sha256=sha256, progress=progress
        )
    raise _unknown(url, scheme)


def _scheme(url: str, settings: Settings) -> str:
    """Return the scheme of a URL. Raises ArtifactError where it leads over the network and there is none to be used."""
    try:
        parts = urlsplit(url)
        scheme, _ = parts.scheme, parts.port
    except ValueError as error:
        raise ArtifactError(f"{shown_url(url)!r} is not a URL: {error}; correct it") from None
    if settings.offline and scheme != "file":
        raise ArtifactError(
            f"{shown_url(url)!r} is not opened: gpuflow is offline here (GPUFLOW_OFFLINE); use a folder, file:///..."
        )
    return scheme


def _unknown(url: str, scheme: str) -> ArtifactError:
    return ArtifactError(f"{shown_url(url)!r}: the scheme {scheme!r} is not known; use file:, http:, https: or s3:")
