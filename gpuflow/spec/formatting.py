"""Puts values into texts with `{name}`. No attribute, index or conversion of a value can be named. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

#: Longest text of one prompt, in characters: a template that repeats what it made would double with each step.
MAX_TEXT: Final = 10 << 20
#: Most that the prompts of one template hold together, in characters.
MAX_TEXTS: Final = 64 << 20
#: Most texts that one template makes, those of its steps included: a worker makes them between other work.
MAX_MADE: Final = 1_000_000
_PART: Final = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w-]{0,99})\}")


def fill(text: str, values: Mapping[str, str], *, strict: bool) -> str:
    """Return the text with `{name}` replaced, and `{{` and `}}` as one brace.

    A name without a value stays as it is, or with `strict` raises ValueError; so does a text that grows too long.
    """
    pieces: list[str] = []
    size = position = 0
    for found in _PART.finditer(text):
        name = found[1]
        if name is None:
            value = found[0][0]
        elif name in values:
            value = values[name]
        elif strict:
            raise ValueError(f"{found[0]} has no value; the arguments are {', '.join(values) or 'none'}")
        else:
            value = found[0]
        pieces += [text[position : found.start()], value]
        size += found.start() - position + len(value)
        position = found.end()
        if size > MAX_TEXT:
            raise ValueError(f"the text has more than the {MAX_TEXT} characters of a prompt")
    return "".join([*pieces, text[position:]])


class Room:
    """What is left of the texts that one template may make."""

    def __init__(self) -> None:
        self._characters, self._texts = MAX_TEXTS, MAX_MADE

    def take(self, text: str) -> str:
        """Return the text. Raises ValueError once there are too many, or too long ones."""
        self._characters -= len(text)
        self._texts -= 1
        if self._characters < 0 or self._texts < 0:
            raise ValueError(
                f"the template makes more than {MAX_TEXTS} characters or {MAX_MADE} texts; give it fewer rows"
            )
        return text


def names_in(text: str) -> Iterator[str]:
    """Yield the names that a text has values put in for."""
    for found in _PART.finditer(text):
        if found[1] is not None:
            yield found[1]


def text_of(value: Any) -> str:
    """Return a value of a column as text: an item by its output, what is no text as JSON. Raises ValueError."""
    if isinstance(value, Mapping) and "output" in value:
        value = value["output"]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_TEXT:
        raise ValueError(f"a value has {len(text)} characters; a prompt has at most {MAX_TEXT}")
    return text
