"""The header `Repr-Digest` of RFC 9530: the SHA-256 of a whole file, as the results service and its client tell it."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

HEADER: Final = "Repr-Digest"
#: Asks a server to tell the digest of the file that it sends (RFC 9530, section 4).
WANT_HEADER: Final = "Want-Repr-Digest"
WANT_SHA256: Final = "sha-256=10"
_SHA256: Final = re.compile(r"(?:^|,)\s*sha-256\s*=\s*:([A-Za-z0-9+/=]+):\s*(?:,|$)")


def repr_digest(sha256: str) -> str:
    """Return the value of the header for a SHA-256 in hex."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode('ascii')}:"


def parse_repr_digest(value: str | None) -> str | None:
    """Return the SHA-256 of a header's value in hex; None where it names none."""
    found = _SHA256.search(value or "")
    if not found:
        return None
    try:
        digest = base64.b64decode(found[1], validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == 32 else None
