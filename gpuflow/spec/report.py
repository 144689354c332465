"""Mistakes and warnings of a template: collecting them, and the one report that lists them all.

Every file of `gpuflow.spec` may use it. It knows paths and lines, nothing of what a template means.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpuflow.errors import InvalidTemplate

#: Where a value stands in a template: keys and list positions from the top.
Path = tuple[str | int, ...]
#: Path now -> path as it was written.
Renames = dict[Path, Path]

#: A check of one section of a task spec: yields path below the section, and message.
Check = Callable[[Any], Iterable[tuple[Path, str]]]

#: What a suggestion begins with: the name is a slip of a known one.
DID_YOU_MEAN: Final = "did you mean"
#: Most lines of one report; `InvalidTemplate.mistakes` holds more of them.
MAX_REPORT_LINES: Final = 100
#: Most mistakes and warnings that are looked for in one template.
MAX_FOUND: Final = 1000
#: Longest piece of a user's value that a report shows, in characters.
_MAX_SHOWN: Final = 60
_SECRET: Final = re.compile(r"(?:^|[_-])token$|secret|password|passwd|api_?key|authorization|headers|credential", re.I)


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One thing that is wrong (or, as a warning, not used): where, in which line (from 1), and cause and mend."""

    path: str
    message: str
    line: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {"path": self.path, "line": self.line, "message": self.message}


@dataclass(kw_only=True)
class Findings:
    """Collects mistakes and warnings. `locate` maps a path to where the user wrote it, `line_of` to its line.

    `checks` are those that layers above this package bring: section of a task spec -> what looks at it. `takes_any`
    says that the programs of the template's project pass over fields that they do not know, wherever these stand.
    """

    locate: Callable[[Path], Path] = lambda path: path
    line_of: Callable[[Path], int | None] = lambda path: None
    mistakes: list[Mistake] = field(default_factory=list)
    warnings: list[Mistake] = field(default_factory=list)
    filled: list[Mistake] = field(default_factory=list)
    seen: set[Mistake] = field(default_factory=set)
    checks: Mapping[str, Check] = field(default_factory=dict)
    takes_any: bool = False

    def add(self, path: Path, message: str, line: int | None = None) -> None:
        """Note a mistake, once; `line` where it is known better than by the path."""
        self._note(self.mistakes, path, message, line)

    def warn(self, path: Path, message: str) -> None:
        """Note a warning, once."""
        self._note(self.warnings, path, message)

    def fill(self, path: Path, message: str) -> None:
        """Note what was filled in where the author of a foreign template left it out, once."""
        self._note(self.filled, path, message)

    def within(self, locate: Callable[[Path], Path]) -> Findings:
        """Return a view that writes into the same lists, with paths mapped by `locate`."""
        return dataclasses.replace(self, locate=locate)

    @property
    def full(self) -> bool:
        """Whether so much was found that looking further helps nobody; a loop over a user's values then stops."""
        return len(self.mistakes) + len(self.warnings) >= MAX_FOUND

    def _note(self, notes: list[Mistake], path: Path, message: str, line: int | None = None) -> None:
        if self.full:
            return
        place = self.locate(path)
        note = Mistake(path=path_text(place), line=self.line_of(place) if line is None else line, message=message)
        if note not in self.seen:
            self.seen.add(note)
            notes.append(note)

    def raise_if_any(self, source: str) -> None:
        """Raise InvalidTemplate with one report when there is a mistake."""
        if self.mistakes:
            raise invalid(source, self.mistakes, self.warnings)


def invalid(source: str, mistakes: Iterable[Mistake], warnings: Iterable[Mistake] = ()) -> InvalidTemplate:
    """Return the error whose message lists the mistakes by line: `file.yaml:12: spec.x: cause; mend`.

    The warnings follow, so that who mends the template sees at once what of it is not used.
    """
    found, told = _by_line(mistakes), _by_line(warnings)
    lines = _lines(source, found, "mistakes") + [f"warning: {line}" for line in _lines(source, told, "warnings")]
    return InvalidTemplate("\n".join(lines), mistakes=found, warnings=told)


def _by_line(notes: Iterable[Mistake]) -> tuple[Mistake, ...]:
    return tuple(sorted(notes, key=lambda one: one.line or 0))


def _lines(source: str, notes: Sequence[Mistake], what: str) -> list[str]:
    lines = [line_text(source, note) for note in notes[:MAX_REPORT_LINES]]
    if len(notes) > MAX_REPORT_LINES:
        lines.append(f"{source}: and {len(notes) - MAX_REPORT_LINES} more {what}")
    return lines


def line_text(source: str, mistake: Mistake) -> str:
    """Return one line of a report."""
    line = f":{mistake.line}" if mistake.line else ""
    path = f"{mistake.path}: " if mistake.path else ""
    return " ".join(f"{source}{line}: {path}{mistake.message}".splitlines())


def path_text(path: Path) -> str:
    """Return a path as people write it: `spec.stages[0].name`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = str(part)
            if len(shown) > _MAX_SHOWN or not shown.isprintable():
                shown = show(shown)
            text += f".{shown}" if text else shown
    return text


def show(value: Any, path: Sequence[str | int] = ()) -> str:
    """Return a short, one-line form of a user's value; what may be a secret (judged by its path) is not shown."""
    if any(isinstance(part, str) and _SECRET.search(part) for part in path) or "env" in path:
        return "<hidden>"
    if isinstance(value, dict):
        return f"a mapping of {len(value)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a huge integer"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = repr(str(value)[: _MAX_SHOWN + 1])
    return text if len(str(value)) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...'"


def suggest(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` when a known name is close, else an empty text."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(str(name).lower()[:100], by_lower, n=1, cutoff=0.7)
    return f"; {DID_YOU_MEAN} {by_lower[near[0]]!r}?" if near else ""


def one_of(names: Iterable[str]) -> str:
    """Return `a, b or c`."""
    listed = list(names)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"
