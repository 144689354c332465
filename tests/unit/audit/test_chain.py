"""The audit chain: whole as it was sealed, and broken by every change, where it begins."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from gpuflow.audit.chain import GENESIS, Check, Key, Link, Verdict, seal, trim
from gpuflow.audit.entries import MOST_BYTES, Entry, entry_fields
from gpuflow.audit.reading import export_lines, verify_export

KEY = Key(secret=b"a key of the tests, long enough")
Items = list[Entry | Link]
#: A link that names no entries of a stream.
LINK = json.dumps(replace(GENESIS, first="-", last="+").sealed(KEY).document())


def entry(number: int, **fields: str) -> Entry:
    return Entry(
        id=f"{1000 + number}-0",
        fields={"action": "task.end", "actor": "worker:w1", "target": f"task:{number}", **fields},
    )


def chain(*sizes: int, key: Key = KEY) -> Items:
    """Return segments of so many entries, each with its link."""
    items: Items = []
    before, total = GENESIS, 0
    for size in sizes:
        entries = [entry(total + number) for number in range(size)]
        before = seal(before, total, entries, key, now=5.0)
        total += size
        items += [*entries, before]
    return items


def trimmed(key: Key = KEY) -> Items:
    """Return a chain of which the first two of three segments were trimmed."""
    items = chain(3, 3, 3, key=key)
    base, head = items[7], items[11]
    assert isinstance(base, Link)
    assert isinstance(head, Link)
    return [*items[7:], trim(head, base, key, now=9.0)]


def check(items: Sequence[Entry | Link], key: Key = KEY, **options: object) -> Verdict:
    return Check(key, **options).run(items)  # type: ignore[arg-type]


def changed(items: Items, at: int, **fields: object) -> Items:
    return [*items[:at], replace(items[at], **fields), *items[at + 1 :]]  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [KEY, Key()], ids=["keyed", "plain"])
def test_a_chain_is_whole_as_it_was_sealed(key: Key) -> None:
    verdict = check([*chain(3, 1, 2, key=key), entry(6)], key)
    assert not verdict.broken
    assert (verdict.entries, verdict.links, verdict.unsealed) == (6, 3, 1)
    verdict = check([*trimmed(key), entry(9)], key)
    assert not verdict.broken
    assert (verdict.entries, verdict.trimmed, verdict.unsealed) == (3, 6, 1)


#: What somebody does to three segments of three (entries 0-2, 4-6, 8-10; links 3, 7, 11), and where it shows.
ATTACKS: dict[str, tuple[Callable[[Items], Items], str]] = {
    "change": (lambda items: changed(items, 5, fields={**items[5].fields, "actor": "x"}), "1004-0"),  # type: ignore[union-attr]
    "id": (lambda items: changed(items, 5, id="1004-1"), "1004-1"),
    "removal": (lambda items: [*items[:5], *items[6:]], "1005-0"),
    "removal of the last": (lambda items: [*items[:6], *items[7:]], "1005-0"),
    "insertion": (lambda items: [*items[:5], entry(99), *items[5:]], "1099-0"),
    "insertion at the end": (lambda items: [*items[:7], entry(99), *items[7:]], "1099-0"),
    "flood": (lambda items: [*items[:7], *map(entry, range(100, 9000)), *items[7:]], "1005-0"),
    "order": (lambda items: [*items[:4], items[5], items[4], *items[6:]], "1004-0"),
    "moved across a link": (lambda items: [*items[:6], items[7], items[6], *items[8:]], "1004-0"),
    "a segment": (lambda items: [*items[:4], *items[8:]], "1006-0"),
    "its entries": (lambda items: [*items[:4], *items[7:]], "1003-0"),
    "its link": (lambda items: [*items[:7], *items[8:]], "1006-0"),
    "head": (lambda items: items[4:], "1003-0"),
    "entries of the head": (lambda items: items[3:], "1002-0"),
    "a link": (lambda items: changed(items, 7, count=4), "1003-0"),
    "the marks of a link": (lambda items: changed(items, 7, marks="0" * 24), "1003-0"),
    "a digest": (lambda items: changed(items, 7, digest="0" * 64), "1003-0"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_every_change_breaks_the_chain_and_is_named(name: str) -> None:
    attack, where = ATTACKS[name]
    verdict = check(attack(chain(3, 3, 3)))
    assert where in verdict.broken


def test_a_cut_tail_is_seen_by_an_anchor() -> None:
    items = chain(3, 3, 3)
    head = check(items).head
    cut = check(items[:8])
    assert not cut.broken, "by itself a shorter chain is a chain"
    assert head in check(items[:8], anchor=head).broken
    assert not check(items, anchor=cut.head).broken, "a log that has grown since still holds what was noted"


def test_a_trim_is_whole_only_as_it_was_said() -> None:
    items = trimmed()
    assert "no link says" in check(items[:-1]).broken
    assert "no link says" in check(items[4:]).broken, "more was removed than was trimmed"
    assert "they are there" in check([*chain(3, 3, 3), items[-1]]).broken


def test_without_the_key_nobody_makes_links() -> None:
    assert "another key" in check(chain(3, key=Key(secret=b"another key, long enough"))).broken
    assert "with a key" in check(chain(3), Key()).broken
    forged = chain(3, 3, key=Key())
    assert "without the key" in check(forged).broken
    verdict = check(forged, allow_unkeyed=True)
    assert not verdict.broken
    assert verdict.unkeyed == 6
    first = chain(3)
    head = first[-1]
    assert isinstance(head, Link)
    later = [entry(3), entry(4)]
    downgraded = [*first, *later, seal(head, 3, later, Key(), now=7.0)]
    assert "without the key" in check(downgraded, allow_unkeyed=True).broken


def test_an_export_is_checked_without_a_broker() -> None:
    strange = Entry(id="1-0", fields={"action": "a", "target": "t\udcff\n", "id": "2", "é": "\u202e"})
    items: Items = [strange, seal(GENESIS, 0, [strange], KEY, now=1.0), entry(1)]
    lines = list(export_lines(items))
    assert all(line.isascii() and line.endswith("\n") for line in lines)
    verdict = verify_export(io.StringIO("".join(lines)), KEY)
    assert not verdict.broken
    assert (verdict.entries, verdict.unsealed) == (1, 1)
    edited = json.loads(lines[0])
    edited["fields"]["action"] = "b"
    assert "1-0" in verify_export(io.StringIO("".join([json.dumps(edited) + "\n", *lines[1:]])), KEY).broken


@pytest.mark.parametrize(
    "line", ["[]", "{}", "x", '{"link": {}}', '{"id": "1-0"}', '{"id": 1, "fields": {}}', "[" * 9999, LINK]
)
def test_what_is_no_export_is_said_by_its_line(line: str) -> None:
    text = "".join(export_lines(chain(1))) + line + "\n"
    assert "line 3" in verify_export(io.StringIO(text), KEY).broken


def test_an_entry_is_clean_and_small_whatever_it_is_made_of() -> None:
    hostile = "\x1b[31m\u202e\ud800" + "\n\u20ac" * 5000
    fields = entry_fields("token.create", hostile, dict.fromkeys(("aa", "bb", "cc"), hostile), hostile)
    assert sum(len(name) + len(value.encode()) for name, value in fields) <= MOST_BYTES
    assert all(char.isprintable() for _, value in fields for char in value)
    for action, detail in (("Bad", "ok"), ("a b", "ok"), ("ok", "a b"), ("ok", "actor")):
        with pytest.raises(ValueError, match="is no"):
            entry_fields(action, "t", {detail: 1}, "me")
