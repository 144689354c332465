"""The results service: `/api/v1/results`, the files of tasks.

GET and HEAD send a file, or the range of it that is asked for; POST takes one in, in one request or in several; DELETE
removes one. Called by HTTP alone; what happens on the disk is in `files` and `uploads`, and nothing blocks the loop.
"""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote, unquote_to_bytes

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response

from gpuflow.artifacts.repr_digest import HEADER, WANT_HEADER, parse_repr_digest, repr_digest
from gpuflow.gateway import downloads
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.file_rights import Action, FileRights
from gpuflow.gateway.files import Entry, ResultsFolder
from gpuflow.gateway.forms import Form, is_form
from gpuflow.gateway.problems import Problem, of_the_disk
from gpuflow.gateway.rights import Caller
from gpuflow.gateway.uploads import Ask, Uploads

PREFIX: Final = "/api/v1/results"
OFFSET: Final = "Upload-Offset"
LENGTH: Final = "Upload-Length"
COMPLETE: Final = "Upload-Complete"
_MOST_LISTED: Final = 10_000


def results_router(folder: ResultsFolder, uploads: Uploads, gatekeeper: Gatekeeper, rights: FileRights) -> APIRouter:
    """Return the routes of the results service."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(gatekeeper), Depends(_path_is_text)], tags=["results"])

    @router.get("")
    async def search(
        caller: Caller,
        prefix: str = "",
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = 1000,
    ) -> dict[str, Any]:
        """List files by `task/name`: all, or what is or lies below `prefix`; `next` is the `after` of the next page.

        With a token that sees some tasks alone, a page may hold fewer than `limit`, or none; the last has `next` null.
        """
        found, following = await rights.search(folder, caller, prefix, after=after, limit=limit)
        files = [{**_described(entry), "name": f"{entry.task_id}/{entry.name}"} for entry in found]
        return {"files": files, "next": following}

    @router.get("/{task_id}/files")
    async def list_files(task_id: str, caller: Caller) -> dict[str, Any]:
        """List the files of one task by name."""
        if not await rights.lists(caller, task_id):
            return {"task_id": task_id, "files": []}
        found = await to_thread.run_sync(folder.entries, task_id)
        return {"task_id": task_id, "files": [_described(entry) for entry in found]}

    @router.post("/{task_id}/files")
    async def upload_form(request: Request, task_id: str, caller: Caller) -> Response:
        """Take in the files of a form, each under its own name."""
        if not is_form(request.headers):
            raise Problem(
                400,
                "no-name",
                f"name the file in the address: POST {PREFIX}/{task_id}/files/<name>, its bytes as the body; "
                "or send a form: -F file=@<name>",
            )
        await rights.check(caller, Action.WRITE, task_id)
        stored = await _take_form(request, uploads, task_id, None)
        return JSONResponse({"task_id": task_id, "files": [_described(entry) for entry in stored]}, status_code=201)

    @router.api_route("/{task_id}/files/{name:path}", methods=["GET", "HEAD"])
    async def download(request: Request, task_id: str, name: str, caller: Caller) -> Response:
        """Send a file; HEAD with the digest of an upload tells how much of it is here."""
        if request.method == "HEAD" and HEADER in request.headers:
            ask = _ask(request, task_id, name)
            await rights.check(caller, Action.WRITE, task_id, name, ask.sha256)
            return await to_thread.run_sync(_progress_of, uploads, ask)
        await rights.check(caller, Action.READ, task_id, name)
        digest = WANT_HEADER in request.headers
        try:
            file = await to_thread.run_sync(lambda: folder.open(task_id, name, digest=digest))
        except OSError as error:
            raise of_the_disk(error, name) from error
        return downloads.answer(request, file)

    @router.post("/{task_id}/files/{name:path}")
    async def upload(request: Request, task_id: str, name: str, caller: Caller) -> Response:
        """Take in a file, or the next bytes of it; without bytes, say how many are here."""
        if is_form(request.headers):
            await rights.check(caller, Action.WRITE, task_id, name)
            (stored,) = await _take_form(request, uploads, task_id, name)
            return _received(stored, stored.size)
        ask = _ask(request, task_id, name)
        await rights.check(caller, Action.WRITE, task_id, name, ask.sha256)
        await to_thread.run_sync(uploads.check_room, ask)
        if ask.length and ask.offset is None and request.headers.get("content-length") == "0":
            return await to_thread.run_sync(_progress_of, uploads, ask)
        entry, here = await uploads.receive(ask, request.stream())
        return _received(entry, here)

    @router.delete("/{task_id}/files/{name:path}", status_code=204)
    async def delete(task_id: str, name: str, caller: Caller) -> Response:
        """Remove a file."""
        await rights.check(caller, Action.REMOVE, task_id, name)
        try:
            await to_thread.run_sync(folder.delete, task_id, name)
        except OSError as error:
            raise of_the_disk(error, name) from error
        return Response(status_code=204)

    return router


async def _take_form(request: Request, uploads: Uploads, task_id: str, name: str | None) -> list[Entry]:
    """Take in the files of a form: each by its own name, or the only one by `name`. Raises Problem."""
    for header in (HEADER, OFFSET, LENGTH):
        if header in request.headers:
            raise Problem(400, "bad-header", f"{header} is of a file alone; send its bytes as the body, without a form")
    form, stored = Form(request.headers, request.stream()), list[Entry]()
    while (given := await form.next_file()) is not None:
        if name is not None and stored:
            raise Problem(
                400,
                "bad-form",
                f"the address names one file, and the form holds more; POST it to {PREFIX}/{task_id}/files",
            )
        ask = Ask(task_id=task_id, name=given if name is None else name, offset=None, length=None, sha256=None)
        await to_thread.run_sync(uploads.check_room, ask)
        entry, _ = await uploads.receive(ask, form.body())
        if entry is not None:
            stored.append(entry)
    if not stored:
        raise Problem(400, "bad-form", "the form holds no file; send -F file=@<name>")
    return stored


async def _path_is_text(request: Request) -> None:
    """Refuse an address that is not UTF-8: its bytes would be replaced, and two names become one."""
    raw: bytes = request.scope.get("raw_path") or b""
    try:
        unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise Problem(400, "bad-name", "the address is not UTF-8; encode names as UTF-8") from None


def _ask(request: Request, task_id: str, name: str) -> Ask:
    """Read what the headers say of an upload. Raises Problem 400."""
    sha256 = None
    if HEADER in request.headers:
        sha256 = parse_repr_digest(request.headers[HEADER])
        if sha256 is None:
            raise Problem(400, "bad-header", f"{HEADER} names no SHA-256; send sha-256=:<base64 of its 32 bytes>:")
    offset, length = _count(request, OFFSET), _count(request, LENGTH)
    if length is None and (body := _count(request, "Content-Length")) is not None:
        length = body + (offset or 0)
    if sha256 is None and offset:
        raise Problem(400, "bad-header", f"only an upload with {HEADER} can be gone on with; send it from the start")
    return Ask(task_id=task_id, name=name, offset=offset, length=length, sha256=sha256)


def _count(request: Request, header: str) -> int | None:
    value = request.headers.get(header)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise Problem(400, "bad-header", f"{header} is {value[:40]!r}; send a count of bytes")
    return int(value)


def _progress_of(uploads: Uploads, ask: Ask) -> Response:
    stored = uploads.stored(ask)
    if stored is not None:
        return JSONResponse(_described(stored), headers={OFFSET: str(stored.size), COMPLETE: "?1"})
    return Response(status_code=204, headers={OFFSET: str(uploads.offset(ask)), COMPLETE: "?0"})


def _received(entry: Entry | None, here: int) -> Response:
    if entry is None:
        return JSONResponse({"bytes_here": here}, status_code=202, headers={OFFSET: str(here), COMPLETE: "?0"})
    return JSONResponse(
        _described(entry),
        status_code=201,
        headers={
            OFFSET: str(here),
            COMPLETE: "?1",
            HEADER: repr_digest(entry.sha256),
            "ETag": f'"{entry.sha256}"',
            "Location": f"{PREFIX}/{quote(entry.task_id, safe='')}/files/{quote(entry.name)}",
        },
    )


def _described(entry: Entry) -> dict[str, Any]:
    return {"name": entry.name, "bytes": entry.size, "sha256": entry.sha256, "modified": entry.mtime}
