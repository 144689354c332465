"""Puts values into texts with `{name}`. No attribute, index or conversion of a value can be named. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

#: Longest text of one prompt, in characters: a template that repeats what it made would double with each step.
MAX_TEXT: Final = 10 << 20
#: Most that the prompts of one template hold together, in characters.
MAX_TEXTS: Final = 64 << 20
#: Most texts that one template makes, those of its steps included: a worker makes them between other work.
MAX_MADE: Final = 1_000_000
#: Most names that a message lists, and most characters of one of them.
_MAX_LISTED: Final = 10
_MAX_SHOWN: Final = 60
_PART: Final = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w-]{0,99})\}")


class TextBudget:
    """What is left of the texts that one template may make."""

    def __init__(self) -> None:
        self._characters, self._texts = MAX_TEXTS, MAX_MADE

    def charge(self, text: str, work: int = 0) -> str:
        """Return the text. Raises ValueError once there are too many, or too long ones.

        `work` is the number of characters that were read to make it; the greater of the two counts.
        """
        self._characters -= max(len(text), work)
        self._texts -= 1
        if self._characters < 0 or self._texts < 0:
            raise ValueError(
                f"the template makes more than {MAX_TEXTS} characters or {MAX_MADE} texts, or reads more to make them; "
                "give it fewer rows, or shorter texts"
            )
        return text

    def join(self, separator: str, parts: Iterable[str]) -> str:
        """Return one text of parts, each counted as it is made. Raises ValueError for too many, or too long ones."""
        kept: list[str] = []
        size = 0
        for part in parts:
            size += len(part) + (len(separator) if kept else 0)
            _fits(size)
            kept.append(part)
        return self.charge(separator.join(kept))


class Pattern:
    """A text with `{name}`, parsed once: what stands in it, and which names it has values put in for."""

    def __init__(self, text: str) -> None:
        self.length = len(text)
        #: Pieces of the text, and None with the name for each place of a value.
        self._pieces: list[tuple[str, str | None]] = []
        position = 0
        for found in _PART.finditer(text):
            if found.start() > position:
                self._pieces.append((text[position : found.start()], None))
            self._pieces.append((found[0][0], None) if found[1] is None else (found[0], found[1]))
            position = found.end()
        if position < len(text):
            self._pieces.append((text[position:], None))
        self.names: Final = frozenset(name for _, name in self._pieces if name is not None)

    def fill(self, values: Mapping[str, Any], budget: TextBudget, *, strict: bool) -> str:
        """Return the text with `{name}` replaced, and `{{` and `}}` as one brace; it takes of `budget`.

        A value is made text when its name is met, so that a text that grows too long ends before the next one is made:
        with ValueError, as with `strict` a name without a value does, which else stays as it is.
        """
        made: list[str] = []
        texts: dict[str, str] = {}
        size = 0
        for piece, name in self._pieces:
            if name is not None and name in values:
                if name not in texts:
                    texts[name] = text_of(values[name])
                text = texts[name]
            elif name is not None and strict:
                raise ValueError(f"{piece} has no value; the arguments are {listed(values)}")
            else:
                text = piece
            size += len(text)
            _fits(size)
            made.append(text)
        return budget.charge("".join(made), work=self.length)


def _fits(size: int) -> None:
    if size > MAX_TEXT:
        raise ValueError(f"the text has more than the {MAX_TEXT} characters of a prompt")


def names_in(text: str) -> Iterator[str]:
    """Yield the names that a text has values put in for."""
    for found in _PART.finditer(text):
        if found[1] is not None:
            yield found[1]


def listed(names: Iterable[str]) -> str:
    """Return the first names of a list, each cut, and how many more there are; `none` for none."""
    shown = [name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}..." for name in names]
    more = f" and {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
    return f"{', '.join(shown[:_MAX_LISTED])}{more}" if shown else "none"


def text_of(value: Any) -> str:
    """Return a value of a column as text: an item by its output, what is no text as JSON. Raises ValueError."""
    if isinstance(value, Mapping) and "output" in value:
        value = value["output"]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_TEXT:
        raise ValueError(f"a value has {len(text)} characters; a prompt has at most {MAX_TEXT}")
    return text
