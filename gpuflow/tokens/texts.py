"""The text of a token: `ut_<id>_<secret>` of a person, `wt_<id>_<secret>` of a worker. Pure but for the secret.

The id is public and names the token in listings; the secret has 256 bits. What is stored is the SHA-256 of the whole
text, which is also how Redis keeps the password of a user.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: Bytes of a secret, and of an id.
SECRET_BYTES: Final = 32
ID_BYTES: Final = 8
_TEXT: Final = re.compile(r"(ut|wt)_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
_ID: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)


class Kind(StrEnum):
    """Whose a token is."""

    USER = "ut"
    WORKER = "wt"


@dataclass(frozen=True, kw_only=True)
class TokenText:
    """A token as its holder has it; shown once, and in no log: its text is not in its representation."""

    kind: Kind
    id: str
    text: str

    def __repr__(self) -> str:
        return f"<{self.kind}_{self.id}_***>"

    @property
    def digest(self) -> str:
        """Return its SHA-256 in hexadecimal digits."""
        return digest_of(self.text)


def new_token(kind: Kind, token_id: str | None = None) -> TokenText:
    """Return a new token, of a new id unless one is given."""
    token_id = token_id or secrets.token_hex(ID_BYTES)
    return TokenText(kind=kind, id=token_id, text=f"{kind}_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}")


def read_token(text: str) -> TokenText | None:
    """Return what a text says as a token, None for any other text."""
    found = _TEXT.fullmatch(text)
    return TokenText(kind=Kind(found[1]), id=found[2], text=text) if found else None


def is_token_id(text: str) -> bool:
    """Say whether a text may be the id of a token."""
    return _ID.fullmatch(text) is not None


def digest_of(text: str) -> str:
    """Return the SHA-256 of a token in hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def same_digest(one: str, other: str) -> bool:
    """Compare two digests in constant time."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
