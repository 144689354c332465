"""Builds plain data from a stream of marks (YAML events or JSON tokens), with lines, limits and no recursion.

Used by the two readers alone. It refuses what could hurt: depth, size after aliases, duplicate keys, numbers that JSON
or Redis cannot hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

from gpuflow.spec.report import Findings, Path, show

#: Deepest nesting of a template.
MAX_DEPTH: Final = 64
#: Most values that aliases (`*name`, `<<`) may add by repetition.
MAX_ALIAS_VALUES: Final = 50_000
#: Most values of a template, aliases included.
MAX_VALUES: Final = 2_000_000
#: Most lines remembered; past this, a mistake names the line of what encloses it.
_MAX_LINES: Final = 300_000
#: Integers beyond 64 bits have no place in JSON, Lua or Redis.
MAX_INTEGER: Final = 2**64


class TooMuch(Exception):
    """The document passes a limit; `args` are path, line and message."""


@dataclass(kw_only=True)
class Node:
    """A finished value: its data, how many values it holds, and how deep it nests below itself."""

    data: Any
    size: int = 1
    height: int = 0


@dataclass(kw_only=True)
class Frame:
    """A mapping or list under construction."""

    node: Node
    line: int
    path: Path
    anchor: str | None = None
    key: str | None = None
    key_line: int = 0
    key_lines: dict[str, int] = field(default_factory=dict)
    merges: list[tuple[Node, int]] = field(default_factory=list)


def _has_half(text: str) -> bool:
    """Whether a text holds half of a surrogate pair, which UTF-8 cannot."""
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


class Tree:
    """Receives opens, scalars, aliases and closes; gives the root, and the line of every path."""

    def __init__(self, findings: Findings, merge_key: str | None = "<<") -> None:
        """`merge_key` brings in another mapping (YAML's `<<`); None where no key does."""
        self._merge_key = merge_key
        self.lines: dict[Path, int] = {}
        self.root: Node | None = None
        self._findings = findings
        findings.line_of = self.lines.get
        self._stack: list[Frame] = []
        self._anchors: dict[str, Node] = {}
        self._values = 0
        self._repeated = 0

    @property
    def wants_key(self) -> bool:
        """Whether the next scalar is the key of a mapping."""
        return bool(self._stack) and isinstance(self._stack[-1].node.data, dict) and self._stack[-1].key is None

    @property
    def path(self) -> Path:
        """Where the next value will stand."""
        if not self._stack:
            return ()
        top = self._stack[-1]
        return (*top.path, len(top.node.data) if isinstance(top.node.data, list) else top.key or "")

    def open(self, data: dict[str, Any] | list[Any], line: int, anchor: str | None = None) -> None:
        """Begin a mapping or a list."""
        if self.wants_key:
            raise TooMuch(self._stack[-1].path, line, "a key must be text, not a mapping or a list; quote it")
        path = self.path
        if len(self._stack) >= MAX_DEPTH:
            raise TooMuch(path[:4], line, f"nests deeper than {MAX_DEPTH} levels; flatten it")
        self._remember(path, line)
        self._stack.append(Frame(node=Node(data=data), line=line, path=path, anchor=anchor))

    def key(self, name: str, line: int) -> None:
        """Take the key of the next value; a repeated one is a mistake that names both lines."""
        top = self._stack[-1]
        if _has_half(name):
            self.mistake(top.path, line, "has a key with half of a character (an unpaired surrogate); write it whole")
            name = ""
        first = top.key_lines.get(name)
        if first is not None and name != self._merge_key:
            self.mistake((*top.path, name), line, f"is given twice, in lines {first} and {line}; keep one of them")
        else:
            top.key_lines[name] = line
        top.key, top.key_line = name, line

    def scalar(self, value: Any, line: int, anchor: str | None = None) -> None:
        """Take a finished value that holds no others."""
        path = self.path
        if isinstance(value, float) and not math.isfinite(value):
            self.mistake(path, line, "is not a finite number; give a number")
            value = 0
        elif isinstance(value, int) and abs(value) >= MAX_INTEGER:
            self.mistake(path, line, f"is {show(value)}, too large a number; the limit is 64 bits")
            value = 0
        elif isinstance(value, str) and _has_half(value):
            self.mistake(path, line, "has half of a character (an unpaired surrogate); write the character itself")
            value = ""
        node = Node(data=value)
        if anchor:
            self._anchors[anchor] = node
        self._remember(path, self._stack[-1].key_line if self._stack and self._stack[-1].key else line)
        self._place(node, line)

    def alias(self, name: str, line: int) -> None:
        """Put in what an anchor named, unless that repeats too much."""
        node = self._anchors.get(name)
        if node is None:
            raise TooMuch(
                self.path, line, f"alias *{name[:40]} names nothing finished before it; define &{name[:40]} first"
            )
        if self.wants_key:
            self.key(str(node.data)[:100], line)
            return
        self._repeated += node.size
        if self._repeated > MAX_ALIAS_VALUES:
            raise TooMuch(
                self.path, line, f"aliases repeat more than {MAX_ALIAS_VALUES} values; write them out or use data.path"
            )
        if len(self._stack) + node.height >= MAX_DEPTH:
            raise TooMuch(self.path, line, f"aliases nest deeper than {MAX_DEPTH} levels; flatten it")
        self._remember(self.path, line)
        self._place(node, line)

    def close(self) -> None:
        """End the innermost mapping or list."""
        frame = self._stack.pop()
        for merged, line in frame.merges:
            self._merge(frame, merged, line)
        if frame.anchor:
            self._anchors[frame.anchor] = frame.node
        self._place(frame.node, frame.line)

    def mistake(self, path: Path, line: int, message: str) -> None:
        """Note a mistake at a line that is known here."""
        self.lines.setdefault(path, line)
        self._findings.add(path, message, None if path else line)  # of the whole file: its first line says nothing

    def _place(self, node: Node, line: int) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise TooMuch(
                (), line, f"holds more than {MAX_VALUES} values; put the data in a file of its own (data.path)"
            )
        if not self._stack:
            self.root = node
            return
        top = self._stack[-1]
        top.node.size += node.size
        top.node.height = max(top.node.height, node.height + 1)
        if isinstance(top.node.data, list):
            top.node.data.append(node.data)
            return
        key, top.key = top.key or "", None
        if key == self._merge_key:
            top.merges.append((node, line))
        else:
            top.node.data.setdefault(key, node.data)

    def _merge(self, frame: Frame, merged: Node, line: int) -> None:
        """YAML's merge key: a mapping, or a list of them, whose keys stand where the mapping has none."""
        sources = merged.data if isinstance(merged.data, list) else [merged.data]
        for source in sources:
            if not isinstance(source, dict):
                self.mistake((*frame.path, "<<"), line, "must be a mapping or a list of mappings")
                return
            for key, value in source.items():
                frame.node.data.setdefault(key, value)

    def _remember(self, path: Path, line: int) -> None:
        if len(self.lines) < _MAX_LINES:
            top = self._stack[-1] if self._stack else None
            self.lines.setdefault(path, top.key_line if top and top.key is not None else line)
