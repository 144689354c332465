"""The arithmetic of the audit chain. Pure: entries and links in, digests and a verdict out.

A link closes a segment of entries. Its record holds the ids of the first and last of them, how many there were, and
their running digest, which begins with the digest of the link before; the digest of the link is that of its record.
A digest is SHA-256 over the one before, a newline and canonical JSON; with a key it is HMAC-SHA-256, which nobody can
make again who holds the broker alone. A link of kind `trim` says that the entries through one of the links before it
were removed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gpuflow.audit.entries import ID, Entry

#: Schema number of a record.
CHAIN_SCHEMA: Final = 1
#: Characters of the digest after each entry that a record keeps: they say which entry is wrong.
_MARK: Final = 8
#: More entries than this are no segment of any version: a check keeps no more of them.
_MOST_WAITING: Final = 8192
_MEMBERS: Final = frozenset(
    {"schema", "kind", "previous", "first", "last", "count", "total", "entries", "marks", "at", "key"}
)


@dataclass(frozen=True, kw_only=True)
class Key:
    """What digests are made with. `secret` empty: plain SHA-256."""

    secret: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        """Return what a record says of the key: enough to tell keys apart, and nothing of the key."""
        return hmac.digest(self.secret, b"gpuflow audit key", "sha256").hex()[:16] if self.secret else ""

    def digest(self, before: str, document: Mapping[str, Any]) -> str:
        """Return the digest of a document after `before`."""
        text = f"{before}\n{canonical(document)}".encode()
        return (hmac.digest(self.secret, text, "sha256") if self.secret else hashlib.sha256(text).digest()).hex()


def canonical(document: Mapping[str, Any]) -> str:
    """Return the one JSON text of a document, in ASCII."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link. `total` counts the entries of the log through it, those that were trimmed too; `at` is Unix seconds.

    `first` and `last` are ids of entries; of a link of kind `trim`, `last` is the last that was removed and `total` how
    many were in all, `entries` the digest of the link that the chain begins with since then.
    """

    kind: Literal["seal", "trim"]
    previous: str
    first: str
    last: str
    count: int
    total: int
    entries: str
    marks: str
    at: float
    key: str
    digest: str = ""

    def record(self) -> dict[str, Any]:
        """Return what the digest is of."""
        return {"schema": CHAIN_SCHEMA, **{name: getattr(self, name) for name in sorted(_MEMBERS - {"schema"})}}

    def document(self) -> dict[str, Any]:
        """Return the link as an export holds it."""
        return {"link": self.record(), "digest": self.digest}

    def sealed(self, key: Key) -> Link:
        """Return the link with its digest."""
        return Link(**{**self.__dict__, "digest": key.digest(self.previous, self.record())})

    @classmethod
    def from_record(cls, record: Any, digest: Any) -> Link:
        """Read a link. Raises ValueError."""
        if not isinstance(record, dict) or set(record) != _MEMBERS or record["schema"] != CHAIN_SCHEMA:
            raise ValueError("a link of the chain has another form than this version writes")
        whole = all(isinstance(record[name], int) and not isinstance(record[name], bool) for name in ("count", "total"))
        texts = all(isinstance(record[name], str) for name in _MEMBERS - {"schema", "count", "total", "at"})
        timed = isinstance(record["at"], int | float) and not isinstance(record["at"], bool)
        if not (whole and texts and timed and isinstance(digest, str) and record["kind"] in ("seal", "trim")):
            raise ValueError("a link of the chain has members of other types")
        ids = ("first", "last") if record["kind"] == "seal" else ("last",)
        if not all(ID.fullmatch(record[name]) for name in ids):
            raise ValueError("a link of the chain names no entries")
        return cls(**{name: record[name] for name in _MEMBERS - {"schema"}}, digest=digest)


#: Where a chain begins.
GENESIS: Final = Link(
    kind="seal", previous="", first="", last="", count=0, total=0, entries="", marks="", at=0, key=""
)  # fmt: skip


def seal(before: Link, total: int, entries: Sequence[Entry], key: Key, now: float) -> Link:
    """Return the link after `before` that closes `entries`; `total` were closed before them, by all links."""
    running, marks = before.digest, []
    for entry in entries:
        running = key.digest(running, entry.document())
        marks.append(running[:_MARK])
    return Link(
        kind="seal",
        previous=before.digest,
        first=entries[0].id,
        last=entries[-1].id,
        count=len(entries),
        total=total + len(entries),
        entries=running,
        marks="".join(marks),
        at=now,
        key=key.name,
    ).sealed(key)


def trim(head: Link, base: Link, key: Key, now: float) -> Link:
    """Return the link after `head` which says that the entries through `base` are removed; the chain begins with it."""
    return Link(
        kind="trim",
        previous=head.digest,
        first="",
        last=base.last,
        count=0,
        total=base.total,
        entries=base.digest,
        marks="",
        at=now,
        key=key.name,
    ).sealed(key)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check has found. `broken` says where and how the chain is broken first, '' where it is whole.

    `entries` and `links` were checked; `unsealed` entries follow the last link: that one of them was changed cannot be
    seen yet. `trimmed` entries were removed by retention. `head` is the digest of the last link.
    """

    broken: str = ""
    entries: int = 0
    links: int = 0
    unsealed: int = 0
    trimmed: int = 0
    unkeyed: int = 0
    head: str = ""
    last: str = ""

    def public(self) -> dict[str, Any]:
        """Return it JSON-able."""
        return {"whole": not self.broken, **self.__dict__}


class _Broken(Exception):
    pass


class Check:
    """Checks a chain: entries and links in their order, each segment before its link. `verdict` ends it.

    `anchor`: a digest that was noted earlier; a chain without it has been replaced. `allow_unkeyed`: links that were
    made before there was a key are taken without it.
    """

    def __init__(self, key: Key, *, anchor: str = "", allow_unkeyed: bool = False) -> None:
        self._key = key
        self._plain = Key()
        self._anchor = anchor
        self._allow_unkeyed = allow_unkeyed
        self._before: Link | None = None  # the link before
        self._total = 0  # of the last seal
        self._last = ""
        self._base: Link | None = None  # the first link, where the chain does not begin with GENESIS
        self._trim: Link | None = None
        self._waiting: list[Entry] = []
        self._unkept = 0  # of those that wait
        self._checked = self._links = self._unkeyed = 0
        self._broken = ""
        self._anchored = not anchor

    def feed(self, item: Entry | Link) -> bool:
        """Check one more; False once the chain is broken."""
        if not self._broken:
            try:
                if isinstance(item, Entry):
                    self._wait(item)
                else:
                    self._link(item)
            except _Broken as error:
                self._broken = str(error)
        return not self._broken

    def _wait(self, entry: Entry) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(entry)
        else:
            self._unkept += 1

    def run(self, items: Iterable[Entry | Link]) -> Verdict:
        """Check all of them. Raises what `items` raises."""
        for item in items:
            if not self.feed(item):
                break
        return self.verdict()

    def verdict(self) -> Verdict:
        """Return what was found."""
        broken = self._broken or self._end()
        return Verdict(
            broken=broken,
            entries=self._checked,
            links=self._links,
            unsealed=len(self._waiting) + self._unkept,
            trimmed=self._base.total if self._base is not None else 0,
            unkeyed=self._unkeyed,
            head=self._before.digest if self._before is not None else "",
            last=self._last,
        )

    def _end(self) -> str:
        base, trimmed = self._base, self._trim
        if base is not None and (trimmed is None or (trimmed.entries, trimmed.total) != (base.digest, base.total)):
            return f"the entries through {base.last} are missing, and no link says that they were trimmed"
        if base is None and trimmed is not None:
            return f"a link says that the entries through {trimmed.last} were trimmed, and they are there"
        return "" if self._anchored else f"no link has the digest {self._anchor}: the log was replaced or cut"

    def _link(self, link: Link) -> None:
        what = f"the link of entries {link.first} to {link.last}" if link.kind == "seal" else "a link of a trim"
        key = self._key_of(link, what)
        if not hmac.compare_digest(key.digest(link.previous, link.record()).encode(), link.digest.encode()):
            raise _Broken(f"{what} was changed: its digest is another")
        if self._before is None and link.kind == "seal" and not self._waiting:
            # Those of the first link that is left were trimmed; a later link has to say so.
            self._base, self._total, self._last = link, link.total, link.last
        elif link.previous != (self._before or GENESIS).digest:
            raise _Broken(f"{what} does not follow the one before: one was removed, inserted or moved")
        elif link.kind == "trim":
            self._trim = link
        else:
            self._segment(link, key)
        self._before = link
        self._links += 1
        self._anchored = self._anchored or link.digest == self._anchor

    def _key_of(self, link: Link, what: str) -> Key:
        if link.key == self._key.name:
            return self._key
        if link.key:
            have = "it was made with another key" if self._key.secret else "it was made with a key"
            raise _Broken(f"{what} cannot be checked: {have}; give that one (GPUFLOW_AUDIT_KEY_FILE)")
        keyed_before = self._before is not None and bool(self._before.key)
        if keyed_before or not self._allow_unkeyed:
            raise _Broken(f"{what} was made without the key; if the key came later than the log, add --allow-unkeyed")
        self._unkeyed += link.count
        return self._plain

    def _segment(self, link: Link, key: Key) -> None:
        if self._unkept:
            raise _Broken(f"entries were inserted before {link.last}: no link closes so many")
        entries, self._waiting = self._waiting, []
        running = link.previous
        for number, entry in enumerate(entries):
            running = key.digest(running, entry.document())
            if running[:_MARK] != link.marks[number * _MARK : (number + 1) * _MARK]:
                raise _Broken(f"entry {entry.id} is not what was sealed there: it, or one before it, was changed,"
                              " removed, inserted or moved")  # fmt: skip
            self._checked += 1
        if len(entries) != link.count:
            after = f"after {entries[-1].id}" if entries else f"from {link.first}"
            raise _Broken(f"entries are missing {after}: {len(entries)} of {link.count} through {link.last} are there")
        if running != link.entries or not entries or (entries[0].id, entries[-1].id) != (link.first, link.last):
            raise _Broken(f"the entries {link.first} to {link.last} are not those that were sealed")
        if link.total != self._total + link.count:
            raise _Broken(f"the count of all entries through {link.last} does not follow the one before")
        self._total, self._last = link.total, link.last
