"""What the command line prints: JSON documents, tables and lines. rich is used in a terminal alone.

Everything that comes from users, models or workers passes `clean`, so that it cannot steer the terminal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from gpuflow.terminal import clean, duration, one_line


def emit_json(value: Any) -> None:
    """Print one JSON document, in ASCII, so that it is the same in every terminal."""
    click.echo(json.dumps(value, indent=2, default=str))


def line(text: object = "") -> None:
    """Print text on stdout."""
    click.echo(clean(text))


def note(text: object) -> None:
    """Print a remark on stderr, where it disturbs no pipe."""
    click.echo(clean(text), err=True)


def note_login(name: str, connections_cut: int, warnings: Sequence[str]) -> None:
    """Print what a new login at the broker has done to the one before, and what to look to."""
    if connections_cut:
        note(f"{connections_cut} connections of {name} were cut")
    for warning in warnings:
        note(warning)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], empty: str = "") -> None:
    """Print rows in columns; `empty` when there are none (on stderr)."""
    cells = [[one_line(cell, 300) for cell in row] for row in rows]
    if not cells:
        if empty:
            note(empty)
        return
    if sys.stdout.isatty():
        _rich_table(headers, cells)
        return
    widths = [max(len(row[column]) for row in [list(headers), *cells]) for column in range(len(headers))]
    for row in [[header.upper() for header in headers], *cells]:
        line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for header in headers:
        shown.add_column(header, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(cell, style=style_of(cell)) for cell in row))
    Console().print(shown)


def style_of(cell: str) -> str:
    """Return how a cell is shown in a terminal; "" as it is."""
    return _STYLES.get(cell, "")


_STYLES = {
    "SUCCEEDED": "green",
    "ok": "green",
    "IDLE": "green",
    "RUNNING": "cyan",
    "BUSY": "cyan",
    "FAILED": "red",
    "DEAD": "red",
    "fail": "red",
    "CANCELLED": "yellow",
    "warn": "yellow",
    "SILENT": "yellow",
    "OFFLINE": "dim",
}


def pairs(values: Mapping[str, object]) -> None:
    """Print names and values in two columns; empty values are left out. No line of a value looks like a name."""
    shown = {name: value for name, value in values.items() if value not in (None, "", [], {}, ())}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        lines = clean(text).splitlines() or [""]
        line(f"{name.ljust(width)}  " + f"\n{'':{width}}  ".join(lines))


def when(seconds: float | None) -> str:
    """Return a time of day, with the date if it is not today."""
    if not seconds:
        return ""
    local = time.localtime(seconds)
    same_day = local[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", local)


def age(seconds: float | None, now: float) -> str:
    """Return how long ago something was, by the clock of the server that wrote both."""
    from gpuflow.routing.describe import ago

    return "" if not seconds else f"{ago(now - seconds)} ago"


def when_ago(seconds: float | None, now: float) -> str:
    """Return a time of day and how long ago it was."""
    return "" if not seconds else f"{when(seconds)} ({age(seconds, now)})"


def when_due(seconds: float | None, now: float) -> str:
    """Return a time of day and how far off it is, or how long ago it was."""
    from gpuflow.routing.describe import ago

    return when_ago(seconds, now) if not seconds or seconds <= now else f"{when(seconds)} (in {ago(seconds - now)})"


def span(start: float | None, end: float | None, now: float) -> str:
    """Return how long something took, or has taken until `now`, by the server; empty if it has not begun."""
    return "" if not start else duration((end or now) - start)
