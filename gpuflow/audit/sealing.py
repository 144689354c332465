"""Extends the chain of the audit log over the entries that were appended since, and trims what is too old.

Called by beat every few seconds, and by `gpuflow audit` when somebody checks or exports. Any number of processes may do
it at once, and each may die anywhere: a link is appended by one step that compares the end of the chain
(lua/seal.lua), and whoever was late looks again.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import redis
from redis.client import NEVER_DECODE

from gpuflow.audit.chain import GENESIS, Key, Link, canonical, seal, trim
from gpuflow.audit.entries import Entry
from gpuflow.audit.links import first_link, last_link, links
from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import load_script
from gpuflow.key_files import read_key_file, require_length
from gpuflow.logs import get_logger
from gpuflow.settings import Settings

log = get_logger("gpuflow.audit")

#: Most entries of one link.
SEGMENT: Final = 512
#: Fewer entries than a segment wait so long for their link, in seconds.
SEAL_SECONDS: Final = 60.0
#: So much longer than they are to be kept the oldest entries may stay, in seconds: each trim is a link too.
TRIM_SECONDS: Final = 3600.0
_LEAST_KEY_BYTES: Final = 16


def audit_key(settings: Settings) -> Key:
    """Return the key of the settings; plain SHA-256 where none is set. Raises InvalidSettings."""
    path = settings.audit_key_file
    if path is None:
        return Key()
    secret = read_key_file(path, "GPUFLOW_AUDIT_KEY_FILE")
    return Key(secret=require_length(secret, _LEAST_KEY_BYTES, path, "GPUFLOW_AUDIT_KEY_FILE"))


class Sealer:
    """Seals and trims the log of one fleet."""

    def __init__(self, client: redis.Redis, keys: Keys, key: Key) -> None:
        self._client: Any = client
        self._keys = keys
        self._key = key
        self._told = False

    def may_seal(self, head: Link) -> bool:
        """Whether the chain may be continued with this key: one with a key is never continued without it."""
        return bool(self._key.secret) or not head.key

    def seal(self, *, least_seconds: float = 0.0, most_segments: int | None = None) -> int:
        """Seal what was appended, `most_segments` of it at most; return how many entries. Raises redis errors.

        An open segment stays open until its first entry is `least_seconds` old.
        """
        count = 0
        for number in itertools.count():
            if number == most_segments:
                break
            head = last_link(self._client, self._keys) or GENESIS
            if not self.may_seal(head):
                if not self._told:
                    self._told = True
                    log.warning("audit_not_sealed", cause="the log is sealed with a key; set GPUFLOW_AUDIT_KEY_FILE")
                break
            entries = entries_after(self._client, self._keys, self._last_sealed(head), SEGMENT)
            now = self._now()
            if not entries or (len(entries) < SEGMENT and now - entries[0].at < least_seconds):
                break
            link = seal(head, self._total(head), entries, self._key, now)
            if self._append(head, link):
                count += link.count
                # Whoever keeps this line elsewhere can say later that the log was not replaced: --anchor.
                log.info("audit_sealed", last=link.last, total=link.total, digest=link.digest)
        return count

    def trim(self, keep_seconds: float, most_entries: int) -> int:
        """Trim whole segments that are older than `keep_seconds`, or too many; return how many entries went.

        Raises redis errors.
        """
        head = last_link(self._client, self._keys)
        if head is None or not self.may_seal(head):
            return 0
        now, total = self._now(), self._total(head)
        base: tuple[str, Link] | None = None
        first: Link | None = None
        removed = 0
        for id, link in links(self._client, self._keys):
            if link.kind != "seal":
                continue
            if first is None:
                first, removed = link, _removed(self._client, self._keys, link)
            age = now - Entry(id=link.last, fields={}).at
            if age <= keep_seconds and total - link.total < most_entries:
                break
            base = (id, link)
        if base is None or first is None or base[1].total <= removed:
            return 0
        due = now - Entry(id=first.last, fields={}).at > keep_seconds + TRIM_SECONDS
        if not due and total - removed <= most_entries + most_entries // 100:
            return 0
        id, link = base
        if not self._append(head, trim(head, link, self._key, now), oldest_entry=_after(link.last), oldest_link=id):
            return 0
        log.info("audit_trimmed", through=link.last, entries=link.total - removed)
        return link.total - removed

    def _append(self, head: Link, link: Link, *, oldest_entry: str = "", oldest_link: str = "") -> bool:
        return bool(
            load_script("gpuflow.audit", "seal")(
                self._client,
                [self._keys.audit_chain, self._keys.audit],
                [head.digest, link.digest, canonical(link.record()), oldest_entry, oldest_link],
            )
        )

    def _last_sealed(self, head: Link) -> str:
        return head.last if head.kind == "seal" else self._last_seal().last

    def _total(self, head: Link) -> int:
        return head.total if head.kind == "seal" else self._last_seal().total

    def _last_seal(self) -> Link:
        found = last_link(self._client, self._keys, kind="seal")
        return found or GENESIS

    def _now(self) -> float:
        seconds, micros = self._client.time()
        return float(seconds) + float(micros) / 1e6


def _after(id: str) -> str:
    milliseconds, _, number = id.partition("-")
    return f"{milliseconds}-{int(number) + 1}"


def entries_after(client: Any, keys: Keys, id: str, most: int, last: str = "+") -> list[Entry]:
    """Return up to `most` entries after an id ('' for the first ones) through `last`, byte for byte."""
    first = f"({id}" if id else "-"
    raw = client.execute_command("XRANGE", keys.audit, first, last, "COUNT", most, **{NEVER_DECODE: True})
    return [Entry.from_stream(found, fields or {}) for found, fields in raw]


def unsealed(client: Any, keys: Keys) -> int:
    """Return how many entries of the log no link closes, counted without reading them or a key. Raises redis errors."""
    head, first = last_link(client, keys, kind="seal"), first_link(client, keys)
    sealed = head.total - _removed(client, keys, first) if head is not None and first is not None else 0
    return max(0, int(client.xlen(keys.audit)) - sealed)


def _removed(client: Any, keys: Keys, first: Link) -> int:
    """Return how many entries were trimmed, by the first link that is left: it is trimmed up to, and stays."""
    raw = client.execute_command("XRANGE", keys.audit, first.last, first.last, **{NEVER_DECODE: True})
    return 0 if raw else first.total


__all__ = ["SEAL_SECONDS", "SEGMENT", "Sealer", "audit_key", "entries_after", "unsealed"]
