"""The form of a reference to a JSON value in an artifact store: `{"$artifact": {url, sha256, bytes}}`. Pure.

It stands in a spec or a result where the value itself would be too large. Anyone may call this; `artifacts.references`
makes and loads references. A list may be referred to in part: `count` is how many entries it has, `slice` which of them
are meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

KEY: Final = "$artifact"
#: Largest value that a reference may stand for, in bytes of JSON.
MAX_BYTES: Final = 1 << 30
_SCHEMES: Final = frozenset({"file", "http", "https", "s3"})
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_MAX_URL: Final = 4000


@dataclass(frozen=True, kw_only=True)
class ArtifactReference:
    """Where a value lies, the SHA-256 and the size in bytes of its JSON, and for a list its length and the part meant.

    `slice` is (start, end) as Python counts.
    """

    url: str
    sha256: str
    size: int
    count: int | None = None
    slice: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as it stands in a spec or a result."""
        inside: dict[str, Any] = {"url": self.url, "sha256": self.sha256, "bytes": self.size}
        if self.count is not None:
            inside["count"] = self.count
        if self.slice is not None:
            inside["slice"] = list(self.slice)
        return {KEY: inside}


def is_reference(value: Any) -> bool:
    """Say whether a value is meant as a reference: a mapping whose only key is `$artifact`."""
    return isinstance(value, Mapping) and len(value) == 1 and KEY in value


def read_reference(value: Any) -> ArtifactReference:
    """Return the reference that a value is. Raises ValueError with cause and mend for a malformed one."""
    inside = value[KEY] if is_reference(value) else None
    if not isinstance(inside, Mapping) or set(inside) - {"url", "sha256", "bytes", "count", "slice"}:
        raise ValueError(f"{KEY} must hold url, sha256 and bytes, as gpuflow writes them")
    url, digest, size = inside.get("url"), inside.get("sha256"), inside.get("bytes")
    if not isinstance(url, str) or len(url) > _MAX_URL or _scheme(url) not in _SCHEMES:
        raise ValueError(f"{KEY}.url must be a URL with file:, http:, https: or s3:")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{KEY}.sha256 must be 64 digits of lower-case hex")
    if not isinstance(size, int) or not _is_count(size) or size > MAX_BYTES:
        raise ValueError(f"{KEY}.bytes must be a count of at most {MAX_BYTES}")
    count, part = inside.get("count"), inside.get("slice")
    if count is not None and (not _is_count(count) or count > size):
        raise ValueError(f"{KEY}.count must be the length of a list")
    if part is not None and (not isinstance(part, list | tuple) or len(part) != 2 or not all(map(_is_count, part))):
        raise ValueError(f"{KEY}.slice must be [start, end]")
    return ArtifactReference(
        url=url, sha256=digest, size=size, count=count, slice=None if part is None else (part[0], part[1])
    )


def _scheme(url: str) -> str:
    try:
        return urlsplit(url).scheme
    except ValueError:
        return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
