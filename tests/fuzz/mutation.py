"""Changes inputs: bytes by cutting, repeating, joining and inserting, JSON trees by the same on their nodes.

All chance comes from the generator that is given, so the same generator makes the same input.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import yaml

#: Largest input, in bytes: what the limit of time is promised for.
MOST_BYTES = 64 << 10
#: One input in so many is blown up to a large one; the others stay near the size of what they are made of.
LARGE_ONE_IN = 25

NUMBERS = (0, 1, -1, 7, 255, 4096, 65_535, 2**31 - 1, 2**53 + 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 10**400)
#: JSON values that a reader may trip over.
VALUES: tuple[Any, ...] = (
    None, True, False, "", " ", "0", "-1", "null", "a", "a" * 300, "\x00", "\n", "é", "\u202e", "\ud800", "😀",
    [], {}, [[]], [None], {"": ""}, [{}], {"a": None}, 0.1, -0.0, 1e308, 5e-324, 1.5,
    "${", "${a}", "${a.result}", "${stage.result.items[0].output}", "${env:HOME}", "$${env:A}", "${env:", "$$${x.y}",
    "1h", "-3s", "1e9 GiB", "8GiB", "0.5", "A100:1", "A100:9999", "H100:0.5", "40GB+", "a=b", "*", "..", "/", "../x",
    "http://h/x", "http://u:p@h", "s3://b/k", "file:///etc/passwd", "http://[::1", "${env:A}://x", "list", "file",
    {"$artifact": {"url": "http://h/x", "sha256": "0" * 64, "bytes": 3}}, {"$artifact": 1},
    {"__type__": "datetime", "__value__": 1}, {"__type__": "gpuflow.mapping", "__value__": 7},
    {"type": "list", "items": [1]}, *NUMBERS,
)  # fmt: skip
_WORDS: tuple[bytes, ...] = (
    b"\x00", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n", b"\r\n", b"\t", b" ", b"'", b'"', b"\\",
    b"{", b"}", b"[", b"]", b"[[[[", b"{{{{", b":", b",", b"-", b"- ", b"? ", b"&a ", b"*a ", b"<<: ", b"!!x ", b"|\n",
    b">\n", b"%", b"@", b"`", b"#", b"---\n", b"...\n", b"${", b"${a.b}", b"$", b"${env:", b"null", b"true", b"NaN",
    b"Infinity", b"1e999", b"-0", b"0x", b"0" * 40, b"9" * 600, b"\\u0000", b"\\ud800", b"\x1b[2J", b"\x1b]0;",
    b"__type__", b"a" * 200, b"=", b"/", b"..", b"../", b"?", b"&", b";", b"\x7f",
)  # fmt: skip


class Mutator:
    """Makes inputs from a corpus; `words` are texts of its format, `keys` names of fields."""

    def __init__(self, corpus: Sequence[bytes], *, words: Sequence[bytes] = (), keys: Sequence[str] = ()) -> None:
        self.corpus = tuple(corpus)
        self.words = (*_WORDS, *words, *words)
        self.keys = tuple(keys)

    def content(self, rng: random.Random) -> bytes:
        """Return a changed input; one in LARGE_ONE_IN is blown up."""
        if rng.randrange(LARGE_ONE_IN) == 0:
            return self.grown(rng, rng.choice((4 << 10, 16 << 10, MOST_BYTES)))
        data = rng.choice(self.corpus)
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            data = self._changed(rng, data)
        return data[:MOST_BYTES]

    def grown(self, rng: random.Random, size: int) -> bytes:
        """Return an input of `size` bytes in which one piece is repeated; the same at each size but for the count."""
        data = rng.choice(self.corpus)
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:
            piece = rng.choice(self.words)
        else:
            start = rng.randrange(len(data) + 1)
            piece = data[start : start + rng.randint(1, 60)] or b"x"
        if rng.random() < 0.3:
            piece += rng.choice(self.words)
        count = max(0, size - len(data)) // len(piece)
        return (data[:at] + piece * count + data[at:])[:size]

    def _changed(self, rng: random.Random, data: bytes) -> bytes:
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 4, 16, 64, 512)))
        kind = rng.randrange(9)
        if kind == 0 and data:
            at = min(at, len(data) - 1)
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        if kind == 1:
            return data[:at] + data[end:]
        if kind == 2:
            return data[:end] + data[at:end] * rng.choice((1, 2, 8)) + data[end:]
        if kind == 3:
            other = rng.choice(self.corpus)
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        if kind == 4:
            return data[:at]
        if kind == 5:
            return data[:at] + str(rng.choice(NUMBERS)).encode() + data[end:]
        if kind == 6:
            return data[:at] + rng.randbytes(rng.choice((1, 2, 4, 16))) + data[end:]
        return data[:at] + rng.choice(self.words) + data[at if kind == 7 else end :]

    def tree(self, rng: random.Random, value: Any, steps: int | None = None) -> Any:
        """Return a changed copy of JSON data."""
        value = copy.deepcopy(value)
        for _ in range(rng.choice((1, 1, 1, 2, 4)) if steps is None else steps):
            value = self._changed_tree(rng, value)
        return value

    def _changed_tree(self, rng: random.Random, root: Any) -> Any:
        places = list(_places(root))
        if not places:
            return self._value(rng)
        holder, key = rng.choice(places)
        kind = rng.randrange(10)
        if kind <= 3:
            holder[key] = self._value(rng)
        elif kind == 4:
            del holder[key]
        elif kind == 5 and isinstance(holder, dict):
            holder[self._key(rng)] = holder.pop(key)
        elif kind == 6 and isinstance(holder, dict):
            holder[self._key(rng)] = self._value(rng)
        elif kind == 7:
            other, name = rng.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                holder[key] = copy.deepcopy(other[name])
        elif kind == 8:
            depth = rng.choice((1, 2, 10, 70))
            for number in range(depth):
                holder[key] = [holder[key]] if number % 2 else {self._key(rng): holder[key]}
        elif isinstance(holder[key], list):
            holder[key] = holder[key] * rng.choice((0, 2, 3, 50))
        elif isinstance(holder[key], str):
            holder[key] = self._text(rng, holder[key])
        elif isinstance(holder[key], int | float):
            holder[key] = rng.choice((*NUMBERS, 1e308, 0.5, str(holder[key]), bool(holder[key])))
        return root

    def _value(self, rng: random.Random) -> Any:
        return copy.deepcopy(rng.choice(VALUES))

    def _key(self, rng: random.Random) -> str:
        if self.keys and rng.random() < 0.7:
            return rng.choice(self.keys)
        return rng.choice(("", "a", "x.y", "${a}", "__type__", "$artifact", "<<", "0", "a" * 200, "\n", "é"))

    def _text(self, rng: random.Random, text: str) -> str:
        return self._changed(rng, text.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")


def _places(value: Any) -> Any:
    """Yield (mapping or list, key) of each value inside a value."""
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, item in pairs:
            yield holder, key
            waiting.append(item)


def as_json(value: Any) -> bytes:
    """Return JSON in ASCII: it can hold half of a surrogate pair."""
    return json.dumps(value).encode()


def as_yaml(value: Any) -> bytes:
    """Return YAML in block style; JSON, which is YAML too, where that cannot say it."""
    try:
        text: str = yaml.dump(value, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), allow_unicode=False)
        return text.encode()
    except (yaml.YAMLError, ValueError, UnicodeEncodeError, RecursionError):
        return as_json(value)


def fields_of(trees: Sequence[Any]) -> list[str]:
    """Return all keys of mappings in trees."""
    found = {key for tree in trees for holder, key in _places(tree) if isinstance(holder, dict)}
    return sorted(found)


Make = Callable[[random.Random], bytes]
