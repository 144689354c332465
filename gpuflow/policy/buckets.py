"""Which buckets of S3 a task may name (GPUFLOW_ALLOW_BUCKETS): the worker's keys reach them, whoever asks. Pure.

What lies below the fleet's own store is judged by its owner, as results elsewhere are (`artifacts.task_access`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote, urlsplit

from gpuflow.policy.refusal import Refusal

SETTING: Final = "GPUFLOW_ALLOW_BUCKETS"


def is_bucket_url(url: str) -> bool:
    """Say whether a URL would be read as one of S3."""
    try:
        return urlsplit(url).scheme == "s3"
    except ValueError:
        return False


def parts_of(url: str) -> tuple[str, ...]:
    """Return the bucket of an s3: URL and the parts of its key. Raises ValueError for one that reads in two ways."""
    if any(ord(char) < 32 for char in url) or url != url.strip() or "?" in url or "#" in url:
        raise ValueError("the URL holds ?, # or a control character; write such a character as %3F")
    split = urlsplit(url)
    key = unquote(split.path).strip("/")
    parts = tuple(key.split("/")) if key else ()
    if not split.netloc or {"", ".", ".."} & set(parts):
        raise ValueError("the URL has no bucket, or a part of it is empty, . or ..")
    return (split.netloc.lower(), *parts)


def below(parts: Sequence[str], store: Sequence[str]) -> tuple[str, ...] | None:
    """Return what of a place comes after that of a store, None for another place."""
    return tuple(parts[len(store) :]) if tuple(parts[: len(store)]) == tuple(store) else None


def refusal(parts: Sequence[str], allowed: Sequence[str], *, path: str = "") -> Refusal | None:
    """Say why a place in a bucket is refused; None: it is listed.

    An entry is a bucket or bucket/prefix, each part of it a glob; it holds for all below it.
    """
    for entry in allowed:
        globs = entry.strip("/").split("/")
        if len(globs) <= len(parts) and all(map(fnmatch.fnmatchcase, parts, globs)):
            return None
    shown = f"s3://{'/'.join(parts)}"
    return Refusal(
        path=path,
        setting=SETTING,
        message=f"{shown} is in no bucket that tasks may name; to allow it, list its bucket in {SETTING} of the worker",
    )
