"""Entries of the audit log, and `record`, by which everything outside a Lua step appends one.

An entry is a flat mapping of texts: `action`, `actor`, `target`, and details. It holds names and numbers, never a
template, a value of an environment variable or a token. Its id is that of the stream: the time in milliseconds on the
server's clock, and a number.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import redis

from gpuflow.audit.actors import MOST_CHARACTERS, actor_here
from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import load_script, script_text
from gpuflow.terminal import one_line

#: The most bytes of an entry, with the names of its fields.
MOST_BYTES: Final = 4096
#: Most details of an entry; further ones are left out.
_MOST_DETAILS: Final = 16
#: A repeat of a call whose answer was lost comes within so many seconds.
REPEAT_SECONDS: Final = 120
#: The longest detail, in characters.
_MOST_DETAIL: Final = 1000
_ACTION: Final = re.compile(r"[a-z]+(?:[._-][a-z]+)*")
_DETAIL: Final = re.compile(r"[a-z][a-zA-Z_]{0,31}")
_NAMED: Final = ("action", "actor", "target")
#: An id of an entry.
ID: Final = re.compile(r"\d{1,18}-\d{1,18}")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry as it is stored: its id and its fields. What is no UTF-8 stands in them as lone surrogates."""

    id: str
    fields: Mapping[str, str]

    @property
    def at(self) -> float:
        """When it was appended, in Unix seconds on the server's clock."""
        return int(self.id.partition("-")[0]) / 1000

    def document(self) -> dict[str, Any]:
        """Return what the chain is made of and an export holds."""
        return {"id": self.id, "fields": dict(self.fields)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Entry:
        """Read what `document` has returned. Raises ValueError."""
        id, fields = document.get("id"), document.get("fields")
        if not isinstance(id, str) or not ID.fullmatch(id):
            raise ValueError("an entry has no id of a stream")
        if set(document) != {"id", "fields"} or not isinstance(fields, dict):
            raise ValueError(f"entry {id} has other members than id and fields")
        if not all(isinstance(value, str) for value in fields.values()):
            raise ValueError(f"the fields of entry {id} are no texts")
        return cls(id=id, fields=fields)

    @classmethod
    def from_stream(cls, id: bytes, fields: Mapping[bytes, bytes]) -> Entry:
        """Read an entry as the server gives it, byte for byte."""
        return cls(id=id.decode("ascii"), fields={_text(name): _text(value) for name, value in fields.items()})

    def public(self) -> dict[str, Any]:
        """Return what users see, JSON-able and in clean text."""
        details = {
            _clean(name): _clean(value, _MOST_DETAIL) for name, value in self.fields.items() if name not in _NAMED
        }
        return {"id": self.id, "at": self.at, **{name: self.text(name) for name in _NAMED}, "details": details}

    def text(self, name: str) -> str:
        """Return a field in clean text, '' where there is none."""
        return _clean(self.fields.get(name, ""))


def record(
    client: redis.Redis,
    keys: Keys,
    action: str,
    target: str,
    details: Mapping[str, Any] | None = None,
    *,
    actor: str | None = None,
) -> None:
    """Append one entry: once, though the answer be lost. `actor` None: who acts in this context.

    `action` is one of a fixed set of words such as `token.create`, `target` a kind and a name such as `token:ci`. Names
    from outside are cleaned and cut. Raises ValueError for an action or detail of another form, and redis errors.
    """
    fields = entry_fields(action, target, details or {}, actor or actor_here())
    flat = [text for pair in fields for text in pair]
    sent = keys.audit_sent(uuid.uuid4().hex)
    load_script("gpuflow.audit", "append")(client, [keys.audit, sent], [REPEAT_SECONDS, *flat])


def entry_fields(action: str, target: str, details: Mapping[str, Any], actor: str) -> list[tuple[str, str]]:
    """Return the fields of an entry, cleaned and within `MOST_BYTES`. Raises ValueError."""
    if not _ACTION.fullmatch(action):
        raise ValueError(f"{action!r} is no action: write words of small letters with dots between them")
    fields = [("action", action), ("actor", _clean(actor)), ("target", _clean(target))]
    left = MOST_BYTES - sum(len(name) + len(value.encode()) for name, value in fields)
    for name, value in list(details.items())[:_MOST_DETAILS]:
        if not _DETAIL.fullmatch(name) or name in _NAMED:
            raise ValueError(f"{name!r} is no name of a detail")
        text = _clean(value, _MOST_DETAIL)
        left -= len(name) + len(text.encode())
        if left < 0:
            break
        fields.append((name, text))
    return fields


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _clean(value: object, most: int = MOST_CHARACTERS) -> str:
    return one_line(value, most).encode("utf-8", "replace").decode()


def audit_preamble() -> str:
    """Return the Lua function `audit`, for the steps that append to the log themselves."""
    return script_text("gpuflow.audit", "common")
