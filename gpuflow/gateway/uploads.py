"""Takes in one file: streamed to a part, hashed on the way, visible under its name when it is whole and right.

Called by the results routes. The wire follows the drafts of "Resumable Uploads for HTTP" (Upload-Offset,
Upload-Length, Upload-Complete) and RFC 9530 (Repr-Digest). A part belongs to one name and one content: uploads of
different contents under one name do not meet, and the last that is whole has the name; a second upload of the same
content at the same time is told to come again. Without a digest a broken upload is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from anyio import to_thread

from gpuflow.artifacts.marking import mark_used
from gpuflow.gateway.files import Entry, ResultsFolder
from gpuflow.gateway.parts import Part, PartDigest
from gpuflow.gateway.problems import Problem, of_the_disk

_BLOCK_BYTES: Final = 1 << 20
_DIGESTS_KEPT: Final = 1024


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one upload may take: bytes, and seconds without a byte before it is ended (what came in is kept).

    `max_uploads`: how many may come in at the same time; each holds up to 1 MiB of memory.
    """

    max_file_bytes: int = 512 * 1024**3
    max_uploads: int = 256
    silence_seconds: float = 30.0
    #: Parts that nobody went on with for so long are removed.
    part_seconds: float = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client says of its upload. `offset` None: from the start, whatever is there; `length` None: not told."""

    task_id: str
    name: str
    offset: int | None
    length: int | None
    sha256: str | None


class Uploads:
    """All uploads into one results folder."""

    def __init__(self, folder: ResultsFolder, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._known: OrderedDict[Path, PartDigest] = OrderedDict()
        self._open_uploads = 0
        self._lock = threading.Lock()

    def offset(self, ask: Ask) -> int:
        """Return how many bytes of an upload are here. Raises Problem 400."""
        self._folder.place(ask.task_id, ask.name)
        try:
            return self._folder.part_path(ask.task_id, ask.name, ask.sha256).stat().st_size if ask.sha256 else 0
        except FileNotFoundError:
            return 0

    def stored(self, ask: Ask) -> Entry | None:
        """Return the file when its very content is stored already, and mark it as used. Raises Problem 400, OSError."""
        if ask.sha256 is None:
            return None
        try:
            # Without its length every digest would have to be taken, of whatever size the file is.
            file = self._folder.open(ask.task_id, ask.name, digest_of_size=ask.length)
        except Problem as problem:
            if problem.status == 404:
                return None
            raise
        os.close(file.descriptor)
        if file.sha256 != ask.sha256:
            return None
        mark_used(self._folder.place(ask.task_id, ask.name).parent)
        return Entry(task_id=ask.task_id, name=ask.name, size=file.size, mtime=file.mtime_ns / 1e9, sha256=file.sha256)

    def check_room(self, ask: Ask) -> None:
        """Raise Problem 400, 404, 409, 413 or 507 where the upload cannot end well, as far as can be known."""
        path = self._folder.place(ask.task_id, ask.name)
        if path.is_dir():
            raise Problem(409, "in-the-way", f"{ask.name!r} is a folder; use another name")
        for parent in path.relative_to(self._folder.root).parents:
            if (self._folder.root / parent).is_file():
                raise Problem(409, "in-the-way", f"{ask.name!r} lies below {parent.name!r}, which is a file")
        if ask.length is None:
            return
        if ask.length > self._limits.max_file_bytes:
            raise self._too_large(ask)
        if ask.length - self.offset(ask) > shutil.disk_usage(self._folder.root).free:
            raise Problem(
                507,
                "disk-full",
                f"{ask.name!r} has {ask.length} bytes, more than the disk of the results has free; free space there",
            )

    async def receive(self, ask: Ask, stream: AsyncIterator[bytes]) -> tuple[Entry | None, int]:
        """Take in the body of one request.

        Returns the stored file, or None when bytes are still missing, and how many bytes are here. Raises Problem
        400, 404, 408, 409, 413, 422, 429, 507, and what `stream` raises.
        """
        if self._open_uploads >= self._limits.max_uploads:  # counted by the loop's one thread
            raise Problem(
                429,
                "too-many-uploads",
                f"{self._open_uploads} uploads are coming in, and this gateway takes no more at a time; come again, or "
                "raise GPUFLOW_GATEWAY_MAX_UPLOADS where it runs",
                {"Retry-After": "1"},
            )
        self._open_uploads += 1
        try:
            return await self._receive(ask, stream)
        finally:
            self._open_uploads -= 1

    async def _receive(self, ask: Ask, stream: AsyncIterator[bytes]) -> tuple[Entry | None, int]:
        part = await to_thread.run_sync(self._open, ask)
        keep = False
        try:
            try:
                await self._fill(part, ask, stream)
                if ask.length is not None and part.size < ask.length:
                    keep = True
                    return None, part.size
                return await to_thread.run_sync(self._finish, part, ask), part.size
            except OSError as error:
                raise of_the_disk(error, ask.name) from error
        except (Problem, asyncio.CancelledError) as error:
            keep = not isinstance(error, Problem) or error.status in (408, 507)
            raise
        except Exception:  # the client has gone
            keep = True
            raise
        finally:
            self._leave(part, keep=keep and ask.sha256 is not None)

    def remove_old_parts(self) -> None:
        """Remove the parts that nobody went on with for long."""
        oldest = time.time() - self._limits.part_seconds
        for path in self._folder.parts.glob("*/*.part"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest and (part := Part.open(path, resume=False)) is not None:
                    with part:
                        part.discard()

    def _open(self, ask: Ask) -> Part:
        path = self._folder.part_path(ask.task_id, ask.name, ask.sha256)
        with self._lock:
            known = self._known.get(path)
        try:
            part = Part.open(path, known, resume=ask.offset is not None)
        except OSError as error:
            raise of_the_disk(error, ask.name) from error
        if part is None:
            raise Problem(
                409,
                "in-progress",
                f"{ask.name!r} with this content is just coming in from elsewhere; come again",
                {"Retry-After": "1"},
            )
        if ask.offset is not None and ask.offset != part.size:
            with part:
                size = part.size
                if not size:
                    part.discard()
            raise Problem(
                409,
                "wrong-offset",
                f"{size} bytes of {ask.name!r} are here, so go on from {size}, not from {ask.offset}",
                {"Upload-Offset": str(size)},
            )
        return part

    async def _fill(self, part: Part, ask: Ask, stream: AsyncIterator[bytes]) -> None:
        waiting = bytearray()
        try:
            async for chunk in self._lively(stream, ask):
                size = part.size + len(waiting) + len(chunk)
                if size > self._limits.max_file_bytes:
                    raise self._too_large(ask)
                if ask.length is not None and size > ask.length:
                    raise Problem(400, "too-long", f"{ask.name!r} was said to have {ask.length} bytes, and more came")
                waiting += chunk
                if len(waiting) >= _BLOCK_BYTES:
                    block, waiting = waiting, bytearray()
                    await to_thread.run_sync(part.append, block)
        finally:
            if waiting:  # also when the line is cut: every byte that came need not come again
                part.append(waiting)

    async def _lively(self, stream: AsyncIterator[bytes], ask: Ask) -> AsyncIterator[bytes]:
        """Pass a stream on; raise Problem 408 when it is silent for too long."""
        while True:
            try:
                async with asyncio.timeout(self._limits.silence_seconds):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                silence = f"{self._limits.silence_seconds:g} s"
                raise Problem(408, "silent", f"nothing of {ask.name!r} came for {silence}; go on with it") from None
            yield chunk

    def _finish(self, part: Part, ask: Ask) -> Entry:
        sha256 = part.sha256
        if ask.sha256 is not None and sha256 != ask.sha256:
            raise Problem(
                422,
                "wrong-digest",
                f"{ask.name!r} came in with the SHA-256 {sha256}, not {ask.sha256}; it is not stored, send it again",
            )
        target = self._folder.place(ask.task_id, ask.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        found = part.commit(target)
        self._folder.keep_digest(ask.task_id, ask.name, found, sha256)
        return Entry(task_id=ask.task_id, name=ask.name, size=found.st_size, mtime=found.st_mtime, sha256=sha256)

    def _leave(self, part: Part, *, keep: bool) -> None:
        with part, self._lock:
            self._known.pop(part.path, None)
            if keep:
                self._known[part.path] = part.known()
                while len(self._known) > _DIGESTS_KEPT:
                    self._known.popitem(last=False)
            else:
                part.discard()

    def _too_large(self, ask: Ask) -> Problem:
        return Problem(
            413,
            "too-large",
            f"{ask.name!r} is larger than the {self._limits.max_file_bytes} bytes that this gateway takes; raise "
            "GPUFLOW_GATEWAY_MAX_FILE_BYTES where it runs",
        )
