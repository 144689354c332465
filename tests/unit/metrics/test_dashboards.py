"""Dashboard, alert rules and the docs name metrics that exist, and all of them are described."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from gpuflow.fleet.registry import OVERDUE_SHARE
from gpuflow.metrics.table import METRICS
from gpuflow.settings import Settings
from tests.support.runbook import nights

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "howto" / "monitor-with-prometheus.md"
#: Every series that the exposition can have, by name.
SERIES = {
    row.shown_name + suffix
    for row in METRICS.values()
    for suffix in (("_bucket", "_sum", "_count") if row.kind == "histogram" else ("",))
}
#: Metrics without a panel, and why.
NO_PANEL = {
    "gpuflow_build_info": "a text, not a number: for joins and for the table of targets",
    "gpuflow_attempts_started_total": "attempts that end are shown, by outcome; those that run are the tasks held",
    "gpuflow_merge_regrouped_total": "seldom and no fault: a call of a run was tried by itself",
    "gpuflow_merge_released_total": "as before; it follows on a loss of records, which the repairs show",
    "gpuflow_merge_kept_results": "their bytes are shown, which is what has a limit that can hurt",
    "gpuflow_served_models": "each has its replicas in a panel",
}
_NAME = re.compile(r"\bgpuflow_[a-z0-9_]+")


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((ROOT / "configs" / "alerts" / "gpuflow.rules.yaml").read_text("utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def dashboard_queries(panel: Any) -> Iterator[str]:
    for one in panel["panels"]:
        yield from (target["expr"] for target in one.get("targets", ()))
        yield from dashboard_queries(one) if one.get("panels") else ()


def labels_of(name: str) -> tuple[str, ...]:
    row = next(row for row in METRICS.values() if name.startswith(row.shown_name) and name in SERIES)
    return (*row.labels, "le")


def check(query: str) -> None:
    """Check names, label matchers and brackets of a query."""
    names = _NAME.findall(query)
    assert set(names) <= SERIES, f"{query} names {set(names) - SERIES}"
    for name, matchers in re.findall(r"(gpuflow_[a-z0-9_]+)\{([^}]*)\}", query):
        for label in re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", matchers):
            assert label in labels_of(name), f"{query}: {name} has no label {label}"
    for opened, closed in ("()", "[]", "{}"):
        assert query.count(opened) == query.count(closed), query


def test_each_query_of_the_dashboard_names_metrics_that_exist() -> None:
    found = list(dashboard_queries(json.loads((ROOT / "configs" / "dashboards" / "gpuflow.json").read_text("utf-8"))))
    assert len(found) > 30
    for query in found:
        assert _NAME.search(query), query
        check(query)


def test_each_metric_has_a_panel_or_a_reason_for_none() -> None:
    found = dashboard_queries(json.loads((ROOT / "configs" / "dashboards" / "gpuflow.json").read_text("utf-8")))
    shown = {name for query in found for name in _NAME.findall(query)}
    without = {
        row.shown_name
        for row in METRICS.values()
        if not shown & {row.shown_name, *(row.shown_name + end for end in ("_bucket", "_sum", "_count"))}
    }
    assert without == set(NO_PANEL)


def test_the_dashboard_is_what_the_tool_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", ROOT / "tools" / "make_dashboard.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    made = "run `python tools/make_dashboard.py` and commit what it writes"
    assert tool.FILE.read_text("utf-8") == tool.text(), made
    places = [panel["gridPos"] for panel in tool.dashboard()["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)), "two panels lie on each other"
    assert all(at["x"] + at["w"] <= 24 for at in places)


def test_each_alert_is_complete_and_says_what_to_do() -> None:
    anchors = {night.anchor for night in nights()}
    listed = re.findall(
        r"^\| `(Gpuflow\w+)` \| .+ \| \[\d+\]\(\.\./runbook\.md#(.+)\) \|$", DOCS.read_text("utf-8"), re.M
    )
    linked = []
    for rule in rules():
        check(rule["expr"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        notes = rule["annotations"]
        assert notes["summary"] and notes["description"].endswith(".")
        page, _, anchor = notes["runbook_url"].partition("#")
        assert page.endswith("/docs/runbook.md") and anchor in anchors, f"{rule['alert']} leads to no night"
        linked.append((rule["alert"], anchor))
    assert listed == linked, "the page lists other alerts, or other nights of them"
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))


def test_an_alert_can_fire_and_counts_no_gateway_twice() -> None:
    found = {rule["alert"]: rule for rule in rules()}
    settings = Settings()
    silent = settings.heartbeat_interval_seconds * (1 + OVERDUE_SHARE)
    waits, unit = re.fullmatch(r"(\d+)([sm])", found["GpuflowWorkerSilent"]["for"]).groups()  # type: ignore[union-attr]
    assert int(waits) * {"s": 1, "m": 60}[unit] < settings.heartbeat_timeout_seconds - silent
    for rule in found.values():
        query = rule["expr"]
        for name in _NAME.findall(query):
            kind = next(row.kind for row in METRICS.values() if row.shown_name == name)
            assert kind == "counter" or not re.search(r"\b(delta|increase|rate)\(", query), query
            if kind == "counter":
                assert re.search(r"max by \([a-z, ]+\) \(increase\(" + name, query), query


def test_the_page_lists_exactly_the_metrics() -> None:
    rows = [line for line in DOCS.read_text("utf-8").splitlines() if line.startswith("| `gpuflow_")]
    wanted = [
        f"| `{row.shown_name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {row.text} |"
        for row in METRICS.values()
    ]
    assert rows == wanted
    for query in re.findall(r"`([^`]*gpuflow_[^`]*)`", DOCS.read_text("utf-8")):
        if re.search(r"[({]", query):
            check(query.replace("\\|", "|"))
