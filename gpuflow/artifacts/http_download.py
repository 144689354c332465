"""One file of any web server, brought here: streamed, gone on with where its .part ends, its digest checked.

Called through `store.fetch` and by the HTTP store. A server that tells a digest (RFC 9530) is held to it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import httpx

from gpuflow.artifacts.http_client import MAX_ATTEMPTS, answered, checked, connect, http_errors, persistently, token_for
from gpuflow.artifacts.partial import disk_errors, has_content, left_over
from gpuflow.artifacts.receiving import Meter, check_size, receive
from gpuflow.artifacts.repr_digest import HEADER, WANT_HEADER, WANT_SHA256, parse_repr_digest
from gpuflow.artifacts.store import Progress, StoredFile, Throttle, shown_url
from gpuflow.policy.hosts import Hosts
from gpuflow.settings import Settings

_WHOLE: Final = 200
_PARTIAL: Final = 206
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")


def fetch_http(
    url: str,
    target: Path,
    *,
    settings: Settings,
    throttle: Throttle,
    sha256: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    name: str | None = None,
    max_bytes: int | None = None,
    hosts: Hosts | None = None,
) -> StoredFile:
    """Bring the file at a URL of any web server to `target`, as `Store.get` does. Raises ArtifactError, TooLarge.

    The worker's token is sent to the fleet's own results service alone; `token` to the host of `url` alone. `hosts`:
    what may be reached (None: everything); for anything else it raises NotAllowed.
    """
    name = name or unquote(urlsplit(url).path.rpartition("/")[2]) or "the file"
    action = f"{name} cannot be fetched from {shown_url(url)}"
    token = token_for(url, settings, token)
    with (
        disk_errors(f"{name} cannot be fetched to {target}"),
        http_errors(action, url, token),
        connect(token, hosts) as client,
    ):
        if has_content(target, sha256):
            size, digest = target.stat().st_size, str(sha256).lower()
            Meter(progress).reached(size)
        else:
            download = _Download(client, url, target, sha256, Meter(progress), throttle, max_bytes)
            size, digest = persistently(download.go_on, lambda: download.position, max_attempts)
    return StoredFile(name=name, size=size, sha256=digest, url=shown_url(url))


class _Download:
    """One file on its way here; `position` is the farthest byte that has come."""

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        target: Path,
        sha256: str | None,
        meter: Meter,
        throttle: Throttle,
        max_bytes: int | None,
    ) -> None:
        self._client, self._url, self._target, self._max_bytes = client, url, target, max_bytes
        self._sha256, self._meter, self._throttle = sha256, meter, throttle
        self._version = secrets.token_hex(8)
        self.position = 0

    def go_on(self) -> tuple[int, str]:
        """Bring what is missing; return size and digest. Raises HttpFailure, httpx.HTTPError, ArtifactError."""
        begin = left_over(self._target)
        if begin:  # what is there is not sent again, unless it turns out to be of another version
            with self._asked(begin) as answer:
                if answer.status_code == _WHOLE or _starts_at(answer, begin):
                    return self._receive(answer, begin)
        with self._asked(0) as answer:
            return self._receive(answer, 0)

    def _asked(self, begin: int) -> contextlib.AbstractContextManager[httpx.Response]:
        headers = {WANT_HEADER: WANT_SHA256, **({"Range": f"bytes={begin}-"} if begin else {})}
        return answered(self._client, self._url, headers)

    def _receive(self, answer: httpx.Response, begin: int) -> tuple[int, str]:
        checked(answer)
        start, size = _span(answer, begin)
        check_size(size or 0, self._max_bytes, shown_url(self._url))
        etag = answer.headers.get("ETag", "")
        sha256 = self._sha256 or parse_repr_digest(answer.headers.get(HEADER))
        version = sha256 or etag or answer.headers.get("Last-Modified") or self._version

        def blocks(offset: int) -> Iterator[bytes]:
            usable = not answer.is_closed and not answer.is_stream_consumed
            if usable and (start == offset or (start == 0 and begin > 0)):
                return self._from(answer, start, offset)
            answer.close()
            return self._rest(offset, size, etag)

        return receive(
            self._target,
            source_id=version if sha256 else f"{shown_url(self._url)} {version}",
            size=size,
            sha256=sha256,
            blocks=blocks,
            meter=self._meter,
        )

    def _rest(self, offset: int, size: int | None, etag: str) -> Iterator[bytes]:
        if size is not None and offset >= size:
            return
        headers = {WANT_HEADER: WANT_SHA256}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        if offset and etag.startswith('"'):
            headers["If-Range"] = etag
        with answered(self._client, self._url, headers) as answer:
            checked(answer)
            if answer.headers.get("ETag", "") != etag:
                raise httpx.RemoteProtocolError("the file changed between two requests")
            at = offset if answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-") else 0
            yield from self._from(answer, at, offset)

    def _from(self, answer: httpx.Response, at: int, offset: int) -> Iterator[bytes]:
        """Yield what an answer that begins at byte `at` has from `offset` on: a server may know no ranges."""
        for block in self._paced(answer, at):
            if at + len(block) > offset:
                yield block[max(0, offset - at) :]
            at += len(block)

    def _paced(self, answer: httpx.Response, at: int) -> Iterator[bytes]:
        for block in answer.iter_raw(self._throttle.block_bytes):
            self._throttle.wait_for_bytes(len(block))
            at += len(block)
            check_size(at, self._max_bytes, shown_url(self._url))
            self.position = max(self.position, at)
            yield block


def _starts_at(answer: httpx.Response, begin: int) -> bool:
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    return answer.status_code == _PARTIAL and found is not None and int(found[1]) == begin


def _span(answer: httpx.Response, begin: int) -> tuple[int, int | None]:
    """Return where an answer begins in the file, and the size of the whole file where it is told."""
    if begin and _starts_at(answer, begin):
        size = answer.headers["Content-Range"].rpartition("/")[2]
        return begin, int(size) if size.isdigit() else None
    length = answer.headers.get("Content-Length")
    return 0, int(length) if re.fullmatch("[0-9]{1,18}", length or "") else None
