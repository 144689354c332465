"""Errors of the HTTP API, as problem+json (RFC 9457). Every route raises `Problem`; nothing else leaves the API.

A problem names the cause and the mend in `detail`, never a token, and never a path outside the results.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gpuflow.logs import get_logger
from gpuflow.protocol import whole_text

MEDIA_TYPE: Final = "application/problem+json"
#: What the `type` of a problem begins with; the client tells problems apart by what follows.
TYPE_PREFIX: Final = "urn:gpuflow:problem:"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_IN_THE_WAY: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY})

_log = get_logger(__name__)


class Problem(Exception):
    """An answer other than success: `kind` is a short name for programs, `detail` a line for people.

    `errors` lists every mistake of a body, each as `{path, message}`.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[Mapping[str, str]] = (),
    ) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail = status, kind, detail
        self.headers = dict(headers or {})
        self.errors = [dict(error) for error in errors]


def of_the_disk(error: OSError, name: str) -> Problem:
    """Return the problem for an error of the file system with the file `name`."""
    if error.errno in _FULL:
        return Problem(507, "disk-full", f"the disk of the results is full; {name!r} is not stored; free space there")
    if error.errno == errno.EFBIG:
        return Problem(413, "too-large", f"{name!r} is larger than the disk of the results takes")
    if error.errno in _IN_THE_WAY:
        return Problem(409, "in-the-way", f"{name!r} would replace a folder, or lie below a file; use another name")
    if error.errno == errno.ENAMETOOLONG:
        return Problem(400, "bad-name", f"{name!r} is too long for the disk of the results; use a shorter name")
    _log.error("results.disk", name=name, error=error.strerror)
    return Problem(500, "disk", f"{name!r}: {error.strerror or 'the disk failed'}; see the log of the gateway")


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem."""

    @app.exception_handler(Problem)
    async def _ours(_: Request, error: Problem) -> JSONResponse:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def _of_the_router(request: Request, error: HTTPException) -> JSONResponse:
        from gpuflow.gateway.openai_errors import error_response

        kind = "no-such-route" if error.status_code == 404 else "refused"
        detail = "there is no such address; see the reference of the HTTP API" if error.status_code == 404 else None
        problem = Problem(error.status_code, kind, detail or str(error.detail), error.headers)
        # A name of a model with a line break in it finds no route of its own.
        return error_response(problem) if request.url.path.startswith("/v1/") else answer(problem)

    @app.exception_handler(RequestValidationError)
    async def _bad_request(_: Request, error: RequestValidationError) -> JSONResponse:
        mistakes = "; ".join(f"{mistake['loc'][-1]}: {mistake['msg']}" for mistake in error.errors())
        return answer(Problem(400, "bad-request", mistakes))

    @app.exception_handler(OSError)
    async def _of_the_disk(_: Request, error: OSError) -> JSONResponse:
        return answer(of_the_disk(error, "the file"))

    @app.exception_handler(ClientDisconnect)
    async def _gone(_: Request, __: ClientDisconnect) -> JSONResponse:
        return answer(Problem(400, "gone", "the client has gone"))

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
        _log.error("gateway.error", path=request.url.path, error=f"{type(error).__name__}: {error}")
        return answer(Problem(500, "internal", "the gateway failed; see its log"))


def answer(problem: Problem) -> JSONResponse:
    """Return the response that tells of a problem."""
    body = {
        "type": f"{TYPE_PREFIX}{problem.kind}",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": whole_text(problem.detail),
        **({"errors": problem.errors} if problem.errors else {}),
    }
    return JSONResponse(body, status_code=problem.status, headers=problem.headers, media_type=MEDIA_TYPE)
