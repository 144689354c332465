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
    "What is put aside": [
        ("Dead letters and messages aside", "timeseries", "short", [
            ("max(gpuflow_dead_letters)", "dead letters"),
            ("max(gpuflow_unreadable_messages)", "messages put aside"),
        ]),
        ("Messages that are not signed", "timeseries", "short", [
            ("sum by (reason, mode) (increase(gpuflow_messages_refused_total[15m]))", "{{reason}} ({{mode}})"),
        ]),
        ("Tasks that wait for their time", "timeseries", "short", [("max(gpuflow_tasks_delayed)", "delayed")]),
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
        ("Workers that need a look", "timeseries", "short", [
            ("sum by (standing) (gpuflow_workers_standing)", "{{standing}}"),
            ("max(gpuflow_workers_disabled)", "disabled"),
            ("max(gpuflow_workers_unreadable)", "unreadable entries"),
        ]),
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
    "Served models": [
        ("Replicas", "timeseries", "short", [
            ("max by (model) (gpuflow_served_replicas)", "{{model}}: to be loaded"),
            ("max by (model) (gpuflow_served_replicas_loaded)", "{{model}}: loaded"),
        ]),
        ("Replicas that have failed", "timeseries", "short", [
            ("max by (model) (gpuflow_served_failures)", "{{model}}"),
        ]),
        ("Calls", "timeseries", "ops", [
            ("sum by (model, outcome) (rate(gpuflow_served_calls_total[5m]))", "{{model}} {{outcome}}"),
        ]),
        ("Time to the first text", "timeseries", "s", [
            ("histogram_quantile(0.5, sum by (le, model)"
             " (rate(gpuflow_served_first_token_seconds_bucket[15m])))", "{{model}} p50"),
            ("histogram_quantile(0.95, sum by (le, model)"
             " (rate(gpuflow_served_first_token_seconds_bucket[15m])))", "{{model}} p95"),
        ]),
    ],
    "Merged calls, use and cost": [
        ("Merged calls", "timeseries", "ops", [
            ("rate(gpuflow_merge_calls_total[5m])", "calls"),
            ("rate(gpuflow_merge_runs_total[5m])", "runs"),
            ("rate(gpuflow_merge_coalesced_total[5m])", "coalesced"),
            ("rate(gpuflow_merge_batched_total[5m])", "batched"),
            ("rate(gpuflow_merge_hits_total[5m])", "answered by earlier results"),
        ]),
        ("Answers that were not generated again", "timeseries", "ops", [
            ("sum(rate(gpuflow_merge_saved_generations_total[5m]))", "answers"),
            ("sum(rate(gpuflow_merge_saved_tokens_total[5m]))", "tokens"),
        ]),
        ("Results that may answer further calls", "timeseries", "bytes", [
            ("max(gpuflow_merge_kept_result_bytes)", "bytes"),
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
        ("Beats that scale", "timeseries", "short", [("max(gpuflow_scaling_leader)", "")]),
        ("Cost of machines per hour", "timeseries", "short", [("max(gpuflow_machines_cost_per_hour)", "")]),
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
        ("Broker keeps what it is told", "timeseries", "short", [
            ("min(gpuflow_broker_aof_enabled)", "append-only file"),
            ("min(gpuflow_broker_aof_last_write_ok)", "last write"),
        ]),
        ("Connections of the broker", "timeseries", "short", [("max(gpuflow_broker_clients)", "")]),
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
