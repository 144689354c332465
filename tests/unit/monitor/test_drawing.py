"""The drawings: what depends on what, times, memory; no text of a task is markup."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from gpuflow.monitor.drawing import MOST_POINTS, Bar, Node, curves, gantt, graph, levels, memory_bar

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m"


def node(name: str, *needs: str, state: str = "PENDING") -> Node:
    return Node(name=name, state=state, depends_on=needs)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], {}),
        ([node("a"), node("b", "a"), node("c", "b")], {"a": 0, "b": 1, "c": 2}),
        ([node("a"), node("b", "a"), node("c", "a"), node("d", "b", "c")], {"a": 0, "b": 1, "c": 1, "d": 2}),
        ([node("d", "b", "a"), node("b", "a"), node("a")], {"a": 0, "b": 1, "d": 2}),
        ([node("a", "missing")], {"a": 0}),
    ],
)
def test_a_stage_is_right_of_what_it_depends_on(nodes: list[Node], expected: dict[str, int]) -> None:
    assert levels(nodes) == expected


def test_a_circle_and_a_deep_chain_end() -> None:
    assert set(levels([node("a", "b"), node("b", "a")])) == {"a", "b"}
    chain = [node("0"), *(node(str(number), str(number - 1)) for number in range(1, 5000))]
    assert levels(chain[::-1])["4999"] == 4999


@pytest.mark.parametrize(
    "drawn",
    [
        graph([node(HOSTILE, state=HOSTILE)]),
        gantt([Bar(label=HOSTILE, start=1, end=2, state=HOSTILE, note=HOSTILE)], 3),
        curves({HOSTILE: [(1, 2), (2, 1)]}, HOSTILE),
        memory_bar(1000, leased_mib=500, used_mib=300, foreign_mib=100),
    ],
)
def test_drawings_are_whole_xml_without_foreign_markup_or_style(drawn: str) -> None:
    ElementTree.fromstring(drawn)
    assert "<script" not in drawn
    assert "\x1b" not in drawn
    assert not re.search(r"\sstyle=|\son\w+=", drawn)


@pytest.mark.parametrize(
    ("amounts", "widths"),
    [
        ({"leased_mib": 0, "used_mib": 0, "foreign_mib": 0}, [0, 0, 0]),
        ({"leased_mib": 1000, "used_mib": 500, "foreign_mib": 200}, [100, 30, 20]),
        ({"leased_mib": 0, "used_mib": None, "foreign_mib": 200}, [0, 0, 20]),
        ({"leased_mib": 5000, "used_mib": 100, "foreign_mib": 900}, [100, 0, 10]),
    ],
)
def test_a_bar_holds_what_is_leased_used_and_foreign(amounts: dict[str, int | None], widths: list[float]) -> None:
    drawn = ElementTree.fromstring(memory_bar(1000, **amounts))  # type: ignore[arg-type]
    found = [float(one.get("width", "0")) for one in drawn.findall("rect")]
    assert found[1:] == widths


def test_attempts_of_one_task_share_a_row_and_a_running_one_ends_now() -> None:
    bars = [
        Bar(label="tune", start=100, end=110, state="lost"),
        Bar(label="tune", start=115, end=None, state="running"),
        Bar(label="ask", start=112, end=120, state="succeeded"),
    ]
    rects = ElementTree.fromstring(gantt(bars, 120)).findall("rect")
    assert [one.get("y") for one in rects] == ["4", "4", "26"]
    ends = [float(one.get("x", "0")) + float(one.get("width", "0")) for one in rects]
    assert ends[1] == pytest.approx(ends[2], abs=0.2)


def test_a_curve_is_thinned_keeps_its_last_point_and_leaves_out_what_is_no_number() -> None:
    points = [(float(step), 1.0 / (step + 1)) for step in range(10_000)] + [(10_000.0, math.nan), (10_001.0, 0.5)]
    drawn = ElementTree.fromstring(curves({"tune": points}, "loss"))
    line = drawn.find("polyline")
    assert line is not None
    assert len(line.get("points", "").split()) <= MOST_POINTS
    assert "tune 0.5" in drawn.get("aria-label", "")
    assert curves({"tune": [(1.0, math.inf)]}, "loss") == ""
