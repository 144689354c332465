"""Reads the links of the audit chain from Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from redis.client import NEVER_DECODE

from gpuflow.audit.chain import Link
from gpuflow.broker.keys import Keys

_PAGE: Final = 200


class UnreadableChain(Exception):
    """A link of the audit chain cannot be read: somebody else has written it, or a newer version."""


def links(client: Any, keys: Keys) -> Iterator[tuple[str, Link]]:
    """Yield every link with its place in the chain, the oldest first. Raises UnreadableChain and redis errors."""
    first = "-"
    while page := _page(client, "XRANGE", keys, first, "+"):
        yield from page
        first = f"({page[-1][0]}"


def first_link(client: Any, keys: Keys) -> Link | None:
    """Return the first link that is left. Raises UnreadableChain and redis errors."""
    return next((link for _, link in _page(client, "XRANGE", keys, "-", "+", 1)), None)


def last_link(client: Any, keys: Keys, kind: str = "") -> Link | None:
    """Return the last link, of one kind where it is named. Raises UnreadableChain and redis errors."""
    last, most = "+", 1
    while page := _page(client, "XREVRANGE", keys, last, "-", most):
        for _, link in page:
            if kind in ("", link.kind):
                return link
        last, most = f"({page[-1][0]}", _PAGE
    return None


def _page(client: Any, command: str, keys: Keys, first: str, last: str, most: int = _PAGE) -> list[tuple[str, Link]]:
    raw = client.execute_command(command, keys.audit_chain, first, last, "COUNT", most, **{NEVER_DECODE: True})
    return [(id.decode("ascii"), _link(id, fields or {})) for id, fields in raw]


def _link(id: bytes, fields: dict[bytes, bytes]) -> Link:
    try:
        return Link.from_record(json.loads(fields[b"record"]), fields[b"digest"].decode("ascii"))
    except (ValueError, KeyError, RecursionError) as error:
        raise UnreadableChain(f"link {id.decode('ascii')} of the audit chain cannot be read: {error}") from None
