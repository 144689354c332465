"""Makes text safe to show: what a model, a log or a user wrote may hold control characters that steer a terminal.

Used by everything that prints (the command line, the progress view). It knows nothing of tasks.
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
_DIRECTION: Final = re.compile("[\u202a-\u202e\u2066-\u2069]")
_ELLIPSIS: Final = "..."


def clean(text: object) -> str:
    """Return the text without escape sequences, control characters (but newline and tab) and lone surrogates."""
    shown = _ESCAPES.sub("", str(text)).replace("\r\n", "\n").replace("\r", "\n")
    shown = _DIRECTION.sub("", shown)
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(char for char in shown if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs"))


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
