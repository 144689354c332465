"""Says where files of strangers are read: in a reader that somebody has put in place, else in this process.

Called by what brings the inputs of a task to a machine. A worker puts a reader in place, a limited process of its own
(`gpuflow.worker.download_child`); clients and the command line read what their user asked for themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from gpuflow.artifacts import archive, store
from gpuflow.artifacts.task_access import judge_bucket
from gpuflow.policy.hosts import Hosts
from gpuflow.settings import Settings

_REMOTE: Final = frozenset({"http", "https", "s3"})


class Reader(Protocol):
    """Reads for another process."""

    def fetch(
        self,
        url: str,
        target: Path,
        *,
        settings: Settings,
        sha256: str | None,
        token: str | None,
        max_bytes: int | None,
    ) -> store.StoredFile:
        """Fetch a file as `store.fetch` does."""

    def unpack(self, source: Path, target: Path) -> None:
        """Unpack an archive as `archive.unpack` does."""


_reader: Final[ContextVar[Reader | None]] = ContextVar("gpuflow_reader", default=None)


@contextlib.contextmanager
def reading_by(reader: Reader) -> Iterator[None]:
    """Let `reader` read what this thread fetches and unpacks in the block."""
    before = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(before)


def fetch(
    url: str,
    target: Path,
    *,
    settings: Settings,
    sha256: str | None = None,
    token: str | None = None,
    max_bytes: int | None = None,
    hosts: Hosts | None = None,
) -> store.StoredFile:
    """Bring one file to `target`, at most `max_bytes` of it. Raises ArtifactError, TooLarge, NotAllowed.

    A reader reaches what the settings let tasks reach, this process what `hosts` lets it (None: everything).
    """
    judge_bucket(url, settings)
    reader = _reader.get()
    if reader is not None and urlsplit(url).scheme in _REMOTE:
        return reader.fetch(url, target, settings=settings, sha256=sha256, token=token, max_bytes=max_bytes)
    return store.fetch(url, target, settings=settings, sha256=sha256, token=token, max_bytes=max_bytes, hosts=hosts)


def unpack(source: Path, target: Path) -> None:
    """Unpack an archive that nobody vouches for into the new folder `target`. Raises ArtifactError, OSError."""
    reader = _reader.get()
    if reader is not None:
        reader.unpack(source, target)
    else:
        archive.unpack(source, target)
