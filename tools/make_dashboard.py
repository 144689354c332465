"""Writes configs/dashboards/gpuflow.json, the Grafana dashboard: `python tools/make_dashboard.py`.

The panels are a table here, since the JSON of a dashboard is too long to be read; a test checks that the file is what
this makes and that each query names metrics that exist.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).parent.parent / "configs" / "dashboards" / "gpuflow.json"
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
#: Grafana's grid is 24 wide.
WIDTH: Final = 24
HEIGHT: Final = 8

#: Row of the dashboard -> its panels: title, kind, unit, and (query, legend) pairs.
ROWS: Final[dict[str, list[tuple[str, str, str, list[tuple[str, str]]]]]] = {
    "At a glance": [
        ("Unfinished tasks", "stat", "short", [("sum(gpuflow_tasks_unfinished)", "")]),
        ("Workers that are there", "stat", "short", [('sum(gpuflow_workers{state!="OFFLINE"})', "")]),
        ("Dead letters", "stat", "short", [("sum(gpuflow_dead_letters)", "")]),
        ("GPU memory leased", "stat", "percentunit", [
            ("sum(gpuflow_gpu_memory_leased_bytes) / sum(gpuflow_gpu_memory_size_bytes)", ""),
        ]),
        ("Longest wait", "stat", "s", [("max(gpuflow_queue_oldest_seconds)", "")]),
        ("Cost per hour, by use", "stat", "short", [("sum(rate(gpuflow_cost_total[1h])) * 3600", "")]),
    ],
    "Tasks": [
        ("Tasks ended", "timeseries", "ops", [("sum by (state) (rate(gpuflow_tasks_total[5m]))", "{{state}}")]),
        ("Tasks submitted", "timeseries", "ops", [
            ("sum by (type) (rate(gpuflow_tasks_submitted_total[5m]))", "{{type}}"),
        ]),
        ("Open tasks by type", "timeseries", "short", [
            ("sum by (type) (gpuflow_tasks_submitted_total) - sum by (type) (gpuflow_tasks_total)", "{{type}}"),
        ]),
        ("Wait before an attempt", "timeseries", "s", [
            ("histogram_quantile(0.5, sum by (le) (rate(gpuflow_task_wait_seconds_bucket[15m])))", "p50"),
            ("histogram_quantile(0.95, sum by (le) (rate(gpuflow_task_wait_seconds_bucket[15m])))", "p95"),
        ]),
        ("Mean time of an attempt", "timeseries", "s", [
            ("sum by (type) (rate(gpuflow_task_run_seconds_sum[15m]))"
             " / sum by (type) (rate(gpuflow_task_run_seconds_count[15m]))", "{{type}}"),
        ]),
        ("Attempts that did not succeed", "timeseries", "ops", [
            ('sum by (outcome) (rate(gpuflow_attempts_total{outcome!="succeeded"}[15m]))', "{{outcome}}"),
        ]),
    ],
    "Queues": [
        ("Waiting", "timeseries", "short", [
            ('sum by (queue) (gpuflow_queue_tasks{state="waiting"})', "{{queue}}"),
        ]),
        ("Age of the oldest", "timeseries", "s", [("max by (queue) (gpuflow_queue_oldest_seconds)", "{{queue}}")]),
        ("Workers that serve", "timeseries", "short", [("max by (queue) (gpuflow_queue_workers)", "{{queue}}")]),
    ],
    "Workers and GPUs": [
        ("Workers by state", "timeseries", "short", [("sum by (state) (gpuflow_workers)", "{{state}}")]),
        ("GPU utilisation", "timeseries", "percentunit", [
            ("max by (worker, gpu) (gpuflow_gpu_utilization_ratio)", "{{worker}} {{gpu}}"),
        ]),
        ("GPU memory", "timeseries", "bytes", [
            ("sum(gpuflow_gpu_memory_size_bytes)", "size"),
            ("sum(gpuflow_gpu_memory_used_bytes)", "used"),
            ("sum(gpuflow_gpu_memory_leased_bytes)", "leased"),
            ("sum(gpuflow_gpu_memory_foreign_bytes)", "used by others"),
        ]),
        ("Age of heartbeats", "timeseries", "s", [
            ("topk(10, gpuflow_worker_heartbeat_age_seconds)", "{{worker}}"),
        ]),
        ("Free disk", "timeseries", "bytes", [("bottomk(10, gpuflow_worker_disk_free_bytes)", "{{worker}}")]),
        ("Tasks held", "timeseries", "short", [("topk(20, gpuflow_worker_tasks)", "{{worker}}")]),
    ],
    "Merged calls, use and cost": [
        ("Merged calls", "timeseries", "ops", [
            ("rate(gpuflow_merge_calls_total[5m])", "calls"),
            ("rate(gpuflow_merge_runs_total[5m])", "runs"),
            ("rate(gpuflow_merge_coalesced_total[5m])", "coalesced"),
            ("rate(gpuflow_merge_batched_total[5m])", "batched"),
            ("rate(gpuflow_merge_hits_total[5m])", "answered by earlier results"),
        ]),
        ("GPUs in use, by type", "timeseries", "short", [
            ("sum by (type) (rate(gpuflow_gpu_seconds_total[15m]))", "{{type}}"),
        ]),
        ("Power of tasks", "timeseries", "watt", [
            ("sum by (type) (rate(gpuflow_energy_joules_total[15m]))", "{{type}}"),
        ]),
        ("Artifacts", "timeseries", "Bps", [
            ("sum by (type) (rate(gpuflow_artifact_bytes_total[15m]))", "{{type}}"),
        ]),
    ],
    "Scaling and broker": [
        ("Machines", "timeseries", "short", [
            ("sum by (family, state) (gpuflow_machines)", "{{family}} {{state}}"),
        ]),
        ("Scaling actions", "timeseries", "short", [
            ("sum by (action) (increase(gpuflow_scaling_actions_total[15m]))", "{{action}}"),
        ]),
        ("Repairs", "timeseries", "short", [
            ("sum by (kind) (increase(gpuflow_repairs_total[1h]))", "{{kind}}"),
        ]),
        ("Broker memory", "timeseries", "bytes", [
            ("gpuflow_broker_memory_used_bytes", "used"),
            ("gpuflow_broker_memory_max_bytes > 0", "limit"),
        ]),
        ("Leases", "timeseries", "short", [("gpuflow_leases", "held"), ("gpuflow_leases_lost", "lost")]),
        ("Since beat reconciled", "timeseries", "s", [
            ("time() - max(gpuflow_reconciled_timestamp_seconds > 0)", ""),
        ]),
    ],
}  # fmt: skip


def panel(number: int, spec: tuple[str, str, str, list[tuple[str, str]]], place: dict[str, int]) -> dict[str, Any]:
    """Return one panel."""
    title, kind, unit, queries = spec
    return {
        "id": number,
        "title": title,
        "type": kind,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend, "datasource": DATASOURCE}
            for index, (expr, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard."""
    panels: list[dict[str, Any]] = []
    top = number = 0
    for title, specs in ROWS.items():
        number += 1
        place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        panels.append({"id": number, "title": title, "type": "row", "collapsed": False, "gridPos": place, "panels": []})
        top += 1
        height = HEIGHT // 2 if specs[0][1] == "stat" else HEIGHT
        width = WIDTH // (6 if specs[0][1] == "stat" else 3)
        for index, spec in enumerate(specs):
            number += 1
            x, y = index * width % WIDTH, top + index * width // WIDTH * height
            panels.append(panel(number, spec, {"h": height, "w": width, "x": x, "y": y}))
        top += -(-len(specs) * width // WIDTH) * height
    return {
        "uid": "gpuflow",
        "title": "gpuflow",
        "tags": ["gpuflow"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data"}]},
        "panels": panels,
    }


def text() -> str:
    """Return the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
