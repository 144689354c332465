"""Lists, checks and exports the audit log. Called by the command line and the gateway.

An export is JSON lines, which need no broker to be checked: each segment's entries, `{"id": ..., "fields": {...}}`, and
then its link, `{"link": {...}, "digest": "..."}`; what is not sealed yet comes last.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO, Any, Final

import redis

from gpuflow.audit.chain import Check, Key, Link, Verdict, canonical
from gpuflow.audit.entries import Entry
from gpuflow.audit.links import UnreadableChain, links
from gpuflow.audit.sealing import entries_after
from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import load_script

_PAGE: Final = 500
#: Most entries that one question with a filter looks at.
_LOOKED_AT: Final = 50_000
#: The longest line of an export that is read, in characters.
_MOST_LINE: Final = 1 << 20
#: A check that met a trim halfway begins again so often.
_TRIES: Final = 3


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which entries are wanted: globs, '' for all of them, and the oldest time in Unix seconds."""

    actor: str = ""
    action: str = ""
    target: str = ""
    since: float = 0.0

    def matches(self, entry: Entry) -> bool:
        """Whether an entry is wanted."""
        wanted = (("actor", self.actor), ("action", self.action), ("target", self.target))
        return all(not glob or fnmatch.fnmatchcase(entry.text(name), glob) for name, glob in wanted)


class AuditLog:
    """The audit log of one fleet."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client: Any = client
        self._keys = keys

    def newest(self, wanted: Filter, most: int, before: str = "") -> tuple[list[Entry], str]:
        """Return up to `most` entries, the newest first, and after which to go on: '' when there are no more.

        `before`: go on after that entry. With a filter fewer may come although there are more. Raises redis errors.
        """
        found: list[Entry] = []
        looked_at = 0
        oldest = f"{int(wanted.since * 1000)}-0" if wanted.since > 0 else "-"
        at = before
        while page := self._newest_page(at, oldest):
            for entry in page:
                if len(found) == most or looked_at >= _LOOKED_AT:
                    return found, at
                at, looked_at = entry.id, looked_at + 1
                if wanted.matches(entry):
                    found.append(entry)
        return found, ""

    def _newest_page(self, before: str, oldest: str) -> list[Entry]:
        last = f"({before}" if before else "+"
        raw = self._client.execute_command(
            "XREVRANGE", self._keys.audit, last, oldest, "COUNT", _PAGE, **{redis.client.NEVER_DECODE: True}
        )
        return [Entry.from_stream(id, fields or {}) for id, fields in raw]

    def items(self) -> Iterator[Entry | Link]:
        """Yield each segment's entries, then its link; at the end what is not sealed. Raises UnreadableChain."""
        at = ""
        for _, link in links(self._client, self._keys):
            if link.kind == "seal":
                yield from self._entries(at, link.last)
                at = link.last
            yield link
        yield from self._entries(at, "+")

    def _entries(self, after: str, last: str) -> Iterator[Entry]:
        while page := entries_after(self._client, self._keys, after, _PAGE, last):
            yield from page
            after = page[-1].id

    def verify(self, key: Key, *, anchor: str = "", allow_unkeyed: bool = False) -> Verdict:
        """Check the whole log. Raises redis errors."""
        for _ in range(_TRIES):
            before = self._first_link()
            try:
                verdict = Check(key, anchor=anchor, allow_unkeyed=allow_unkeyed).run(self.items())
            except UnreadableChain as error:
                return Verdict(broken=str(error))
            if not verdict.broken:
                verdict = self._counted(verdict, before)
            if not verdict.broken or self._first_link() == before:
                break
        return verdict

    def _counts(self) -> tuple[int, int, str, str, str]:
        found = load_script("gpuflow.audit", "counts")(self._client, [self._keys.audit, self._keys.audit_chain], [])
        there, added, last_added, last, first_link = found
        return int(there), int(added), str(last_added), str(last), str(first_link)

    def _first_link(self) -> str:
        return self._counts()[-1]

    def _counted(self, verdict: Verdict, first_link: str) -> Verdict:
        """Compare with what the server has counted: entries that were removed before they were sealed."""
        there, added, last_added, last, link = self._counts()
        if added < 0 or link != first_link:  # before Redis 7 the server has no count
            return verdict
        missing = added - there - verdict.trimmed
        if missing:
            broken = f"{missing} entries were removed that were not trimmed, of {added} that were appended"
            return replace(verdict, broken=broken)
        if (last or verdict.last) != last_added:
            return replace(verdict, broken=f"entries were removed at the end, through {last_added}")
        return verdict


def export_lines(items: Iterable[Entry | Link]) -> Iterator[str]:
    """Yield the lines of an export."""
    for item in items:
        yield f"{canonical(item.document())}\n"


def verify_export(lines: IO[str], key: Key, *, anchor: str = "", allow_unkeyed: bool = False) -> Verdict:
    """Check an export. Raises OSError."""
    check = Check(key, anchor=anchor, allow_unkeyed=allow_unkeyed)
    try:
        return check.run(_read_lines(lines))
    except ValueError as error:
        return replace(check.verdict(), broken=str(error))


def _read_lines(lines: IO[str]) -> Iterator[Entry | Link]:
    number = 0
    while text := lines.readline(_MOST_LINE):
        number += 1
        try:
            yield _item(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is none of an export: {error}") from None


def _item(document: Any) -> Entry | Link:
    if not isinstance(document, dict):
        raise ValueError("it is no mapping")
    if "link" in document:
        return Link.from_record(document["link"], document.get("digest"))
    return Entry.from_document(document)
