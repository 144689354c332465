"""Makes foreign text safe to show: what a model, a task or a user wrote may steer a terminal or forge a line of a log.

Used by everything that prints or logs: the command line, the progress view, the workers' logs. It knows nothing of
tasks. No text of theirs is given to rich as markup.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

#: ANSI sequences: CSI (colours, cursor), OSC (titles, links), and two-byte escapes.
_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]|\x9b[0-?]*[ -/]*[@-~]"
)
#: Marks that turn the direction of the text after them, and so can make it read as something else.
_DIRECTION: Final = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
#: What ends a line for one reader or another.
_LINE_ENDS: Final = re.compile("\r\n|[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
#: Most of one value that a line of a log takes, in characters.
_MOST_LOGGED: Final = 16_000
_ELLIPSIS: Final = "..."


def clean(text: object) -> str:
    """Return the text without escape sequences, control characters (but newline and tab) and lone surrogates."""
    shown = _LINE_ENDS.sub("\n", _ESCAPES.sub("", str(text)))
    shown = _DIRECTION.sub("", shown)
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(char for char in shown if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs"))


def log_value(text: object) -> str:
    """Return the text as a value of a log line: line ends are shown as \\n, so that it begins no other line."""
    shown = clean(text)
    if len(shown) > _MOST_LOGGED:
        shown = f"{shown[:_MOST_LOGGED]}{_ELLIPSIS}"
    return shown.replace("\n", "\\n")


def log_lines(text: object) -> str:
    """Return the text of a log record of several lines, such as a traceback: all but the first are indented."""
    return clean(text).rstrip("\n").replace("\n", "\n    ")


def one_line(text: object, limit: int = 200) -> str:
    """Return the text on one line, cut to `limit` characters."""
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else f"{line[: limit - len(_ELLIPSIS)]}{_ELLIPSIS}"


def duration(seconds: float) -> str:
    """Return a time span for people: 4.2 s, 1m 05s, 2h 03m."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
