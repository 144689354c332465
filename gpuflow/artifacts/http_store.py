"""Artifacts in a results service (`gpuflow gateway`).

Called through `store.open_store`. Files are streamed; an upload that breaks goes on where the service has it. The first
part of a name is the task, the rest the file's name. Downloads are in `http_download`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote, urlsplit

import httpx

from gpuflow.artifacts.http_client import (
    MAX_ATTEMPTS,
    MAX_PAGE_BYTES,
    HttpFailure,
    ask,
    connect,
    foreign,
    http_errors,
    persistently,
    token_for,
)
from gpuflow.artifacts.http_download import fetch_http
from gpuflow.artifacts.partial import disk_errors
from gpuflow.artifacts.receiving import Meter
from gpuflow.artifacts.repr_digest import HEADER, repr_digest
from gpuflow.artifacts.source_file import digest_of, open_source
from gpuflow.artifacts.store import Progress, StoredFile, Throttle, check_name, check_prefix, shown_url
from gpuflow.errors import ArtifactError
from gpuflow.policy.hosts import Hosts
from gpuflow.settings import Settings

__all__ = ["HttpStore", "fetch_http"]

_LISTED_AT_ONCE: Final = 1000


class HttpStore:
    """Files of the results service at `url` (http://host/api/v1/results)."""

    def __init__(
        self,
        url: str,
        *,
        settings: Settings,
        token: str | None = None,
        throttle: Throttle,
        hosts: Hosts | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.query or parts.fragment or parts.username or parts.password:
            raise ArtifactError(
                f"{shown_url(url)!r} names no results service; use http://host:port/api/v1/results, without user and "
                "query, and give the token by GPUFLOW_WORKER_TOKEN"
            )
        self._base = url.rstrip("/")
        self._hosts = hosts
        self._settings, self._throttle, self._max_attempts = settings, throttle, max_attempts
        self._token = token_for(url, settings, token)

    def put(self, source: Path, name: str, *, progress: Progress | None = None) -> StoredFile:
        """Upload a file, unless its content is there under that name. Raises ArtifactError."""
        url = self.url(name)
        action = f"{name} cannot be stored in {shown_url(self._base)}"
        with (
            disk_errors(action),
            http_errors(action, self._base, self._token),
            open_source(source) as stream,
            connect(self._token, self._hosts) as client,
        ):
            sha256 = digest_of(stream)
            size = os.fstat(stream.fileno()).st_size
            upload = _Upload(client, url, stream, size, sha256, Meter(progress), self._throttle)
            for is_last in (False, True):
                try:
                    persistently(upload.go_on, lambda: upload.offset, self._max_attempts)
                    break
                except HttpFailure as error:
                    if error.kind != "wrong-digest" or is_last:  # a byte was changed on the way: once is bad luck
                        raise
        return StoredFile(name=name, size=size, sha256=sha256, url=url)

    def get(
        self, name: str, target: Path, *, sha256: str | None = None, progress: Progress | None = None
    ) -> StoredFile:
        """Download a file. Raises ArtifactError."""
        return fetch_http(
            self.url(name),
            target,
            settings=self._settings,
            throttle=self._throttle,
            sha256=sha256,
            token=self._token,
            progress=progress,
            max_attempts=self._max_attempts,
            name=name,
            max_bytes=self._settings.download_max_bytes,
            hosts=self._hosts,
        )

    def list(self, prefix: str) -> list[StoredFile]:
        """Return the files of `prefix`. Raises ArtifactError."""
        check_prefix(prefix)
        with (
            http_errors(f"{shown_url(self._base)} cannot be listed", self._base, self._token),
            connect(self._token, self._hosts) as client,
        ):
            found = [
                StoredFile(
                    name=str(item["name"]),
                    size=int(item["bytes"]),
                    sha256=str(item["sha256"]),
                    url=self.url(str(item["name"])),
                )
                for item in self._listed(client, prefix)
            ]
        return sorted(found, key=lambda file: file.name)

    def delete(self, prefix: str) -> int:
        """Delete the files of `prefix`. Raises ArtifactError."""
        check_prefix(prefix)
        deleted = 0
        action = f"{prefix or 'all'} cannot be deleted in {shown_url(self._base)}"
        with (
            http_errors(action, self._base, self._token),
            connect(self._token, self._hosts) as client,
        ):
            for item in list(self._listed(client, prefix)):
                url = self.url(str(item["name"]))
                answer = persistently(lambda url=url: _deleted(client, url), lambda: 0, self._max_attempts)  # type: ignore[misc]
                deleted += answer
        return deleted

    def url(self, name: str) -> str:
        """Return the http(s): URL of a name. Raises ArtifactError for a name without a task."""
        task_id, _, rest = check_name(name).partition("/")
        if not rest:
            raise ArtifactError(f"{name!r} names no task; over HTTP a name is <task id>/<file>")
        return f"{self._base}/{quote(task_id, safe='')}/files/{quote(rest)}"

    def _listed(self, client: httpx.Client, prefix: str) -> Iterator[dict[str, Any]]:
        after = ""
        while True:
            params = {"prefix": prefix, "after": after, "limit": str(_LISTED_AT_ONCE)}
            page: Any = persistently(
                lambda params=params: _page(client, self._base, params),  # type: ignore[misc]
                lambda: 0,
                self._max_attempts,
            )
            yield from page["files"]
            before, after = after, str(page.get("next") or "")
            if not after:
                return
            if after.split("/", 1) <= before.split("/", 1):  # by task, then by name; or it would never end
                raise foreign(200)


class _Upload:
    """One file on its way to the service; `offset` is how much of it the service last said to have."""

    def __init__(
        self, client: httpx.Client, url: str, source: BinaryIO, size: int, sha256: str, meter: Meter, throttle: Throttle
    ) -> None:
        self._client, self._url, self._source = client, url, source
        self._size, self._meter, self._throttle = size, meter, throttle
        self._headers = {HEADER: repr_digest(sha256), "Upload-Length": str(size)}
        self.offset = 0

    def go_on(self) -> None:
        """Send what the service lacks. Raises HttpFailure, httpx.HTTPError."""
        # Without a byte of the file first: a refusal in the midst of a body may get lost with the connection.
        answer = ask(self._client, "POST", self._url, headers=self._headers)
        while answer.headers.get("Upload-Complete") != "?1":
            if "Upload-Offset" not in answer.headers:
                raise foreign(answer.status)
            offset = answer.headers["Upload-Offset"]
            if not (offset.isascii() and offset.isdigit() and len(offset) < 19 and int(offset) <= self._size):
                raise foreign(answer.status)
            self.offset = int(offset)
            self._meter.reached(self.offset)
            headers = {
                **self._headers,
                "Upload-Offset": str(self.offset),
                "Content-Length": str(self._size - self.offset),
                "Content-Type": "application/octet-stream",
            }
            answer = ask(self._client, "POST", self._url, headers=headers, content=self._blocks())
        self._meter.reached(self._size)

    def _blocks(self) -> Iterator[bytes]:
        at = self._source.seek(self.offset)
        while at < self._size and (block := self._source.read(min(self._throttle.block_bytes, self._size - at))):
            self._throttle.wait_for_bytes(len(block))
            yield block
            at += len(block)
            self._meter.reached(at)


def _page(client: httpx.Client, url: str, params: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of a listing, whose form is checked. Raises HttpFailure, httpx.HTTPError."""
    page = ask(client, "GET", url, params=params, most_bytes=MAX_PAGE_BYTES).json()
    files = page.get("files")
    if not isinstance(files, list) or len(files) > _LISTED_AT_ONCE:
        raise foreign(200)
    for item in files:
        size = item.get("bytes") if isinstance(item, dict) else None
        if not isinstance(size, int) or not all(isinstance(item.get(name), str) for name in ("name", "sha256")):
            raise foreign(200)
    return page


def _deleted(client: httpx.Client, url: str) -> int:
    try:
        ask(client, "DELETE", url)
    except HttpFailure as error:
        if error.status == 404:  # somebody else was faster
            return 0
        raise
    return 1
