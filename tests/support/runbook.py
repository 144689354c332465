"""docs/runbook.md as data: its nights, the commands that each says to type, and what these print.

A quoted line stands for what was printed with other numbers and names: digits fit digits, `...` anything, ID, NODE,
NAME, PIPELINE and USER@HOST a word, and blanks any blanks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from click.testing import CliRunner

from gpuflow.cli import cli

PAGE: Final = Path(__file__).parents[2] / "docs" / "runbook.md"
_WORDS: Final = re.compile(r"\s*\.\.\.\s*|USER@HOST|\b(?:ID|PIPELINE|NAME|NODE)\b|127\.0\.0\.1:\d+|\d+(?:[.:]\d+)*|\s+")


@dataclass(frozen=True, kw_only=True)
class Night:
    """One section: its title, the lines to type, and the lines that are quoted."""

    number: int
    title: str
    text: str
    commands: tuple[str, ...]
    quotes: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """The name of the section in a link, as GitHub makes it."""
        return anchor_of(f"{self.number}. {self.title}")


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@lru_cache
def nights() -> tuple[Night, ...]:
    """Return all nights of the page."""
    found = []
    for part in re.split(r"^(?=### |## )", PAGE.read_text("utf-8"), flags=re.M):
        head = re.match(r"### (\d+)\. (.+)\n", part)
        if head:
            block = re.search(r"```\n(.*?)```", part, re.S)
            quotes = re.findall(r"^> (.+)$", part, re.M)
            commands = tuple(block[1].strip().splitlines()) if block else ()
            found.append(Night(number=int(head[1]), title=head[2], text=part, commands=commands, quotes=tuple(quotes)))
    return tuple(found)


def night(number: int) -> Night:
    """Return one night."""
    return nights()[number - 1]


def pattern(quote: str) -> re.Pattern[str]:
    """Return what a quoted line stands for."""
    found, at = [], 0
    for word in _WORDS.finditer(quote):
        found.append(re.escape(quote[at : word.start()]))
        text = word[0]
        if "..." in text:
            found.append(".*")
        elif text.isspace():
            found.append(r"\s+")
        elif text.startswith("127.0.0.1:"):
            found.append(r"127\.0\.0\.1:\d+")
        elif text[0].isdigit():
            found.append(r"[\d.:]+")
        else:
            found.append(r"\S+")
        at = word.end()
    found.append(re.escape(quote[at:]))
    return re.compile("".join(found))


def typed(number: int, env: Mapping[str, str], *, lines: Sequence[int] = (), **words: str) -> str:
    """Type the commands of a night as they stand there (or those of its `lines`), with `words` for ID and its like.

    Returns all that they print.
    """
    said = []
    commands = night(number).commands
    for at in lines or range(len(commands)):
        line = commands[at]
        for name, value in words.items():
            line = re.sub(rf"\b{name}\b", value, line)
        done = CliRunner().invoke(cli, shlex.split(line)[1:], env=env)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        said.append(done.output)
    return "\n".join(said)


def unsaid(number: int, output: str, *, quotes: Sequence[int] = ()) -> list[str]:
    """Return the quoted lines of a night (or those of these numbers) that nothing of the output fits."""
    one_line = [" ".join(line.split()) for line in output.splitlines()]
    return [
        quote
        for at, quote in enumerate(night(number).quotes)
        if (not quotes or at in quotes) and not any(pattern(quote.strip()).search(line) for line in one_line)
    ]
