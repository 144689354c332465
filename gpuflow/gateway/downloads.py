"""Sends a stored file, or the range of it that a client asks for, block by block.

Called by the results routes. Ranges and conditions are those of RFC 9110, sections 13 and 14; of several ranges in one
request none is honoured, which the RFC allows.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final

from anyio import to_thread
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gpuflow.artifacts.repr_digest import HEADER, repr_digest
from gpuflow.gateway.files import OpenFile
from gpuflow.gateway.problems import Problem

_BLOCK_BYTES: Final = 1 << 20
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


@dataclass(frozen=True, kw_only=True)
class Span:
    """`length` bytes from `start` on."""

    start: int
    length: int


def asked_span(headers: Mapping[str, str], size: int, etag: str) -> Span | None:
    """Return the one range that a request asks for; None for the whole file. Raises Problem 416."""
    condition = headers.get("if-range")
    if condition is not None and condition != etag:
        return None
    found = _RANGE.fullmatch(headers.get("range", "").strip())
    if not found or not any(found.groups()):
        return None
    first, last = found.groups()
    if first:
        start, end = int(first), min(int(last) if last else size - 1, size - 1)
        if last and int(last) < int(first):
            return None
    else:
        start, end = max(0, size - int(last)), size - 1
    if start >= size or end < start:
        raise Problem(
            416,
            "no-such-range",
            f"the file has {size} bytes, and none from {start} on",
            {"Content-Range": f"bytes */{size}", "ETag": etag},
        )
    return Span(start=start, length=end - start + 1)


def answer(request: Request, file: OpenFile) -> Response:
    """Return the answer to a GET or HEAD of an open file, which it closes. Raises Problem 416."""
    headers = {
        "ETag": file.etag,
        "Accept-Ranges": "bytes",
        "Last-Modified": formatdate(file.mtime_ns / 1e9, usegmt=True),
        "Cache-Control": "private, no-cache",
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": "attachment",
        "Content-Type": "application/octet-stream",
    }
    if file.sha256:
        headers[HEADER] = repr_digest(file.sha256)
    try:
        if file.etag in [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]:
            os.close(file.descriptor)
            return Response(status_code=304, headers=headers)
        span = asked_span(request.headers, file.size, file.etag)
        status = 200 if span is None else 206
        if span is None:
            span = Span(start=0, length=file.size)
        else:
            headers["Content-Range"] = f"bytes {span.start}-{span.start + span.length - 1}/{file.size}"
        headers["Content-Length"] = str(span.length)
        if request.method == "HEAD":
            os.close(file.descriptor)
            return Response(status_code=status, headers=headers)
    except Problem:
        os.close(file.descriptor)
        raise
    return _Body(file.descriptor, span, status, headers)


class _Body(StreamingResponse):
    """Streams a span of an open file and closes it, also when the client leaves before the first byte."""

    def __init__(self, descriptor: int, span: Span, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(_blocks(descriptor, span), status_code=status, headers=headers)
        self._descriptor = descriptor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)


async def _blocks(descriptor: int, span: Span) -> AsyncIterator[bytes]:
    at, end = span.start, span.start + span.length
    while at < end:
        block = await to_thread.run_sync(os.pread, descriptor, min(_BLOCK_BYTES, end - at), at)
        if not block:  # it was cut short under our hands: the connection ends, and the client sees that it is short
            return
        at += len(block)
        yield block
