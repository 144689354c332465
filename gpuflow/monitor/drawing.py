"""Drawings of the monitor as SVG: bars of GPU memory, the graph of a pipeline, its attempts in time, curves of loss.

Pure. Colours are classes of monitor.css; no style stands in the SVG, which the pages' content security policy forbids.
Every text is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpuflow.terminal import duration, one_line

_NODE_WIDTH: Final = 168
_NODE_HEIGHT: Final = 44
_GAP_X: Final = 48
_GAP_Y: Final = 16
_EDGE: Final = 4
_NAME_CHARS: Final = 20

_LABEL_WIDTH: Final = 190
_CHART_WIDTH: Final = 900
_ROW_HEIGHT: Final = 22
_LABEL_CHARS: Final = 28
#: An attempt that has just begun is drawn so wide, to be seen.
_LEAST_BAR: Final = 2.0

_CURVE_WIDTH: Final = 900
_CURVE_HEIGHT: Final = 220
_CURVE_LEFT: Final = 64
_CURVE_BOTTOM: Final = 28
#: Points of one curve; more are thinned out.
MOST_POINTS: Final = 300


@dataclass(frozen=True, kw_only=True)
class Node:
    """A stage as a box."""

    name: str
    state: str
    depends_on: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """An attempt. Times are Unix seconds; no end: it runs."""

    label: str
    start: float
    end: float | None
    state: str
    note: str = ""


def memory_bar(total_mib: int, *, leased_mib: int, used_mib: int | None, foreign_mib: int) -> str:
    """Return the bar of a GPU's memory: above what is leased, below what is in use, of gpuflow and of others."""
    total = max(1, total_mib)

    def share(mib: int) -> float:
        return round(100 * min(total, max(0, mib)) / total, 2)

    used = share(used_mib) if used_mib is not None else share(foreign_mib)
    foreign = min(used, share(foreign_mib)) if used_mib is not None else used
    words = [f"{share(leased_mib):.0f} % leased"]
    words.append(f"{used:.0f} % in use" if used_mib is not None else "use unknown")
    if foreign:
        words.append(f"{foreign:.0f} % by processes outside gpuflow")
    label = ", ".join(words)
    return (
        f'<svg class="membar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"<title>{label}</title>"
        '<rect class="bar-back" x="0" y="0" width="100" height="10"/>'
        f'<rect class="bar-leased" x="0" y="0" width="{share(leased_mib):g}" height="4"/>'
        f'<rect class="bar-used" x="0" y="5" width="{used - foreign:g}" height="5"/>'
        f'<rect class="bar-foreign" x="{used - foreign:g}" y="5" width="{foreign:g}" height="5"/></svg>'
    )


def graph(nodes: Sequence[Node]) -> str:
    """Return the stages of a pipeline, each to the right of all that it depends on."""
    level = levels(nodes)
    rows: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for node in nodes:
        column = level[node.name]
        row = rows.get(column, 0)
        rows[column] = row + 1
        places[node.name] = (
            _EDGE + column * (_NODE_WIDTH + _GAP_X),
            _EDGE + row * (_NODE_HEIGHT + _GAP_Y),
        )
    width = 2 * _EDGE + (max(rows, default=0) + 1) * (_NODE_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _EDGE + max(rows.values(), default=0) * (_NODE_HEIGHT + _GAP_Y) - _GAP_Y
    lines, boxes = [], []
    for node in nodes:
        x, y = places[node.name]
        for name in node.depends_on:
            if name in places:
                from_x, from_y = places[name]
                lines.append(_edge(from_x + _NODE_WIDTH, from_y + _NODE_HEIGHT / 2, x, y + _NODE_HEIGHT / 2))
        boxes.append(
            f'<g class="node {_state(node.state)}"><title>{_text(f"{node.name}: {node.state}", 300)}</title>'
            f'<rect x="{x}" y="{y}" width="{_NODE_WIDTH}" height="{_NODE_HEIGHT}" rx="6"/>'
            f'<text class="node-name" x="{x + 10}" y="{y + 18}">{_text(node.name, _NAME_CHARS)}</text>'
            f'<text class="node-note" x="{x + 10}" y="{y + 34}">{_text(node.note or node.state.lower(), 24)}</text></g>'
        )
    return (
        f'<svg class="graph" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Graph of {len(nodes)} stages; the table below lists them">{"".join(lines)}{"".join(boxes)}</svg>'
    )


def levels(nodes: Sequence[Node]) -> dict[str, int]:
    """Return the column of each node: one more than the last of those that it depends on. A circle is cut."""
    known = {node.name: node for node in nodes}
    found: dict[str, int] = {}
    for node in nodes:  # a stack of our own: a graph may be deep
        stack = [(node.name, False)]
        open_nodes: set[str] = set()
        while stack:
            name, visited = stack.pop()
            if visited:
                needs = [found[need] for need in known[name].depends_on if need in found]
                found[name] = max(needs, default=-1) + 1
            elif name not in found and name not in open_nodes:
                open_nodes.add(name)
                stack.append((name, True))
                stack += [(need, False) for need in known[name].depends_on if need in known]
    return found


def _edge(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (x1 + x2) / 2
    return f'<path class="edge" d="M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"/>'


def gantt(bars: Sequence[Bar], now: float) -> str:
    """Return attempts as bars in time, one row for each label, in the given order. `now` ends those that run."""
    labels = list(dict.fromkeys(bar.label for bar in bars))
    start = min((bar.start for bar in bars), default=now)
    end = max((now if bar.end is None else bar.end for bar in bars), default=now)
    span = max(1.0, end - start)
    scale = (_CHART_WIDTH - _LABEL_WIDTH - 10) / span
    height = (len(labels) + 1) * _ROW_HEIGHT + 6
    parts = []
    for tick in _ticks(span):
        x = _LABEL_WIDTH + tick * scale
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - _ROW_HEIGHT}"/>'
            f'<text class="tick" x="{x + 2:.1f}" y="{height - 8}">+{html.escape(duration(tick))}</text>'
        )
    for number, label in enumerate(labels):
        parts.append(f'<text class="row" x="0" y="{number * _ROW_HEIGHT + 16}">{_text(label, _LABEL_CHARS)}</text>')
    for bar in bars:
        x = _LABEL_WIDTH + (bar.start - start) * scale
        width = max(_LEAST_BAR, ((now if bar.end is None else bar.end) - bar.start) * scale)
        y = labels.index(bar.label) * _ROW_HEIGHT + 4
        parts.append(
            f'<rect class="attempt {_state(bar.state)}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="14" rx="3">'
            f"<title>{_text(f'{bar.label}: {bar.state} {bar.note}', 300)}</title></rect>"
        )
    return (
        f'<svg class="chart" viewBox="0 0 {_CHART_WIDTH} {height}" role="img" '
        f'aria-label="{len(bars)} attempts in time; the table below lists them">{"".join(parts)}</svg>'
    )


def curves(series: Mapping[str, Sequence[tuple[float, float]]], what: str) -> str:
    """Return curves of (step, value) on linear axes; what is no finite number is left out."""
    kept = {
        name: _thinned([(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)])
        for name, points in series.items()
    }
    every = [point for points in kept.values() for point in points]
    if not every:
        return ""
    xs, ys = [x for x, _ in every], [y for _, y in every]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    scale_x = (_CURVE_WIDTH - _CURVE_LEFT - 10) / ((high_x - low_x) or 1.0)
    scale_y = (_CURVE_HEIGHT - _CURVE_BOTTOM - 12) / ((high_y - low_y) or 1.0)
    bottom = _CURVE_HEIGHT - _CURVE_BOTTOM
    parts = [
        f'<line class="axis" x1="{_CURVE_LEFT}" y1="{bottom}" x2="{_CURVE_WIDTH}" y2="{bottom}"/>',
        f'<line class="axis" x1="{_CURVE_LEFT}" y1="4" x2="{_CURVE_LEFT}" y2="{bottom}"/>',
        f'<text class="tick end" x="{_CURVE_LEFT - 6}" y="16">{high_y:.4g}</text>',
        f'<text class="tick end" x="{_CURVE_LEFT - 6}" y="{bottom}">{low_y:.4g}</text>',
        f'<text class="tick" x="{_CURVE_LEFT}" y="{_CURVE_HEIGHT - 8}">{low_x:g}</text>',
        f'<text class="tick end" x="{_CURVE_WIDTH - 4}" y="{_CURVE_HEIGHT - 8}">{high_x:g}</text>',
    ]
    for number, (name, points) in enumerate(kept.items()):
        path = " ".join(
            f"{_CURVE_LEFT + (x - low_x) * scale_x:.1f},{bottom - (y - low_y) * scale_y:.1f}" for x, y in points
        )
        parts.append(f'<polyline class="curve curve-{number % 6}" points="{path}"><title>{_text(name, 80)}</title>')
        parts.append("</polyline>")
    last = ", ".join(f"{_text(name, 60)} {points[-1][1]:.4g}" for name, points in kept.items() if points)
    return (
        f'<svg class="chart" viewBox="0 0 {_CURVE_WIDTH} {_CURVE_HEIGHT}" role="img" '
        f'aria-label="{_text(what, 40)} over steps; last: {last}">{"".join(parts)}</svg>'
    )


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most MOST_POINTS points, the last one among them."""
    step = math.ceil(len(points) / MOST_POINTS) or 1
    return points[::-1][::step][::-1]


def _ticks(span: float) -> list[float]:
    """Return about five round marks of a time span, in seconds."""
    rough = span / 5
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 86_400)
    step = next((one for one in steps if one >= rough), 86_400.0 * math.ceil(rough / 86_400))
    return [step * number for number in range(int(span // step) + 1)]


def _state(state: str) -> str:
    """Return the class of a state, of letters alone."""
    return "state-" + ("".join(char for char in state.lower() if char.isascii() and char.isalpha()) or "unknown")


def _text(text: object, limit: int) -> str:
    return html.escape(one_line(text, limit))


__all__ = ["MOST_POINTS", "Bar", "Node", "curves", "gantt", "graph", "levels", "memory_bar"]
