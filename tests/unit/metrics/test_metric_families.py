"""From what was read of a fleet to the exposition: every metric is there, well-formed, and bounded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpuflow.broker.scripts import script_text
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.metrics.counters import FIRST_TOKEN_BOUNDS, SECONDS_BOUNDS, durations, parse
from gpuflow.metrics.families import MOST_QUEUES, families
from gpuflow.metrics.reading import QueueReading, Readings
from gpuflow.metrics.table import METRICS
from gpuflow.protocol import REPLICA_UNIT
from gpuflow.serving.models import ServedModel
from gpuflow.serving.replicas import Failure, ServedStatus

ROOT = Path(__file__).parents[3]
EMPTY = Readings(
    now=1000.0, counts={}, merge={}, scaling={}, repairs={}, merge_kept=0, unfinished=0, delayed=0, dead=0,
    unreadable=0, leases=0, lost_leases=0, is_led=False, machines=(), workers=(), queues=(),
)  # fmt: skip
COUNTS = {
    "submitted\n\necho\ncpu": "7", "ended\nSUCCEEDED\necho\ncpu": "5", "ended\nFAILED\nsft\ngpu-a100": "1",
    "started\n\necho": "6", "attempts\nlost\necho": "2",
    "wait_bucket\n0.5\necho": "2", "wait_bucket\n+Inf\necho": "1", "wait_ms\n\necho": "90000500",
    "run_bucket\n15\necho": "4", "run_ms\n\necho": "40000",
    "gpu_ms\n\nsft": "3600000", "energy_mj\n\nsft": "7500", "cost_millionths\n\nsft": "2500000",
    "artifact_bytes\n\necho": "123", "reconciled_at": "990",
}  # fmt: skip


class Collected:
    """What a registry asks of a collector."""

    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> list[Metric]:
        return self.metrics


def registry_of(readings: Readings) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Collected(families(readings)))
    return registry


def samples(readings: Readings) -> dict[str, float]:
    """Return each sample by its name and labels, read back from the text."""
    text = generate_latest(registry_of(readings)).decode()
    return {
        one.name + (json.dumps(one.labels, sort_keys=True) if one.labels else ""): one.value
        for family in parse_text(text)
        for one in family.samples
    }


def worker(worker_id: str, *, host: str = "box", load: dict[str, Any] | None = None, gpus: int = 1) -> WorkerEntry:
    cards = [
        {"uuid": f"GPU-{host}-{number}", "names": ["a100"], "total_mib": 1000, "vram_gb": 40.0, "index": number}
        for number in range(gpus)
    ]
    return WorkerEntry(
        id=worker_id, state=WorkerState.BUSY, hostname=host, capability={"gpus": cards}, load=load or {}, seen_seconds=3
    )


def test_an_empty_fleet_has_each_metric_with_its_help_and_type() -> None:
    text = generate_latest(registry_of(EMPTY)).decode()
    for row in METRICS.values():
        assert f"# HELP {row.shown_name} {row.text}\n" in text
        kind = {"info": "gauge"}.get(row.kind, row.kind)
        assert f"# TYPE {row.shown_name} {kind}\n" in text


def test_both_formats_are_read_by_their_parsers() -> None:
    readings = replace(EMPTY, counts=COUNTS, workers=(worker("w1", load={"gpus": {}}),))
    in_text = {family.name for family in parse_text(generate_latest(registry_of(readings)).decode())}
    in_open = {family.name for family in parse_openmetrics(generate_openmetrics(registry_of(readings)).decode())}
    assert in_open == {row.name for row in METRICS.values()}
    assert len(in_text) == len(METRICS)


def test_names_keep_to_the_conventions() -> None:
    for name, row in METRICS.items():
        assert re.fullmatch(r"gpuflow_[a-z0-9_]+", name) and not name.endswith("_total")
        assert not re.search(r"_(ms|mib|mb|minutes|hours|percent)(_|$)", name)
        assert not {"task", "id", "owner", "tag"} & set(row.labels)


def test_counts_become_counters_in_base_units() -> None:
    found = samples(replace(EMPTY, counts=COUNTS))
    assert found['gpuflow_tasks_submitted_total{"queue": "cpu", "type": "echo"}'] == 7
    assert found['gpuflow_tasks_total{"queue": "gpu-a100", "state": "FAILED", "type": "sft"}'] == 1
    assert found['gpuflow_attempts_total{"outcome": "lost", "type": "echo"}'] == 2
    assert found['gpuflow_gpu_seconds_total{"type": "sft"}'] == 3600
    assert found['gpuflow_energy_joules_total{"type": "sft"}'] == 7.5
    assert found['gpuflow_cost_total{"type": "sft"}'] == 2.5
    assert found["gpuflow_reconciled_timestamp_seconds"] == 990


def test_durations_are_cumulative_and_in_seconds() -> None:
    found = samples(replace(EMPTY, counts=COUNTS))
    assert found['gpuflow_task_wait_seconds_bucket{"le": "0.1", "type": "echo"}'] == 0
    assert found['gpuflow_task_wait_seconds_bucket{"le": "0.5", "type": "echo"}'] == 2
    assert found['gpuflow_task_wait_seconds_bucket{"le": "86400.0", "type": "echo"}'] == 2
    assert found['gpuflow_task_wait_seconds_bucket{"le": "+Inf", "type": "echo"}'] == 3
    assert found['gpuflow_task_wait_seconds_count{"type": "echo"}'] == 3
    assert found['gpuflow_task_wait_seconds_sum{"type": "echo"}'] == pytest.approx(90000.5)


@pytest.mark.parametrize(
    ("package", "script", "name", "expected"),
    [
        ("gpuflow.broker", "common", "SECONDS_BOUNDS", SECONDS_BOUNDS),
        ("gpuflow.serving", "count_call", "FIRST_TOKEN_BOUNDS", FIRST_TOKEN_BOUNDS),
    ],
)
def test_lua_and_python_have_the_same_bounds(package: str, script: str, name: str, expected: tuple[float, ...]) -> None:
    bounds = re.search(name + r" = \{([^}]*)\}", script_text(package, script))
    assert bounds is not None
    assert tuple(float(bound) for bound in bounds[1].split(",")) == expected


def test_a_served_model_is_shown_with_its_replicas_and_calls() -> None:
    def replica(id: str, state: TaskState, progress: dict[str, Any] | None) -> TaskRecord:
        return TaskRecord(id=id, name="replica of one", task_type="inference", state=state, spec={}, progress=progress)

    status = ServedStatus(
        model=ServedModel(name="one", replicas=3),
        replicas=(
            replica("a", TaskState.RUNNING, {"current": 1, "unit": REPLICA_UNIT}),
            replica("b", TaskState.RUNNING, {"current": 1, "unit": "byte"}),
            replica("c", TaskState.QUEUED, None),
        ),
        failure=Failure(count=2, at=1.0, error="no such model"),
    )
    counts = {
        "calls\nfailed\none": "2", "calls\ncancelled\none": "1", "first_bucket\n0.25\none": "3",
        "first_bucket\n+Inf\none": "1", "first_ms\n\none": "91000",
    }  # fmt: skip
    found = samples(replace(EMPTY, counts=counts, served=(status,)))
    of_one = {name.replace(', "model": "one"', ""): value for name, value in found.items() if '"model": "one"' in name}

    assert found["gpuflow_served_models"] == 1
    assert {name: of_one[f'gpuflow_served_{name}{{"model": "one"}}'] for name in (
        "replicas", "replicas_loaded", "failures", "first_token_seconds_count", "first_token_seconds_sum",
    )} == {
        "replicas": 3, "replicas_loaded": 1, "failures": 2, "first_token_seconds_count": 4,
        "first_token_seconds_sum": 91,
    }  # fmt: skip
    calls = {outcome: found[f'gpuflow_served_calls_total{{"model": "one", "outcome": "{outcome}"}}']
             for outcome in ("answered", "failed", "cancelled")}  # fmt: skip
    assert calls == {"answered": 0, "failed": 2, "cancelled": 1}
    assert of_one['gpuflow_served_first_token_seconds_bucket{"le": "0.25"}'] == 3
    assert of_one['gpuflow_served_first_token_seconds_bucket{"le": "60.0"}'] == 3


def test_a_count_of_another_form_is_passed_over() -> None:
    assert list(parse({"reconciled_at": "5", "a\nb\nc\nd\ne": "1", "x\ny\nz": "-1", "p\nq\nr": "many"})) == []
    assert durations({("", "no bound"): 9}, 0).buckets[-1] == 0


def test_queues_beyond_the_bound_are_summed() -> None:
    many = tuple(
        QueueReading(name=f"q{number:04}", waiting=1, running=0, oldest_seconds=number, workers=1)
        for number in range(MOST_QUEUES + 10)
    )
    found = samples(replace(EMPTY, queues=many))
    waiting = {name: value for name, value in found.items() if '"waiting"' in name}
    assert len(waiting) == MOST_QUEUES + 1
    assert waiting['gpuflow_queue_tasks{"queue": "other", "state": "waiting"}'] == 10
    assert found['gpuflow_queue_oldest_seconds{"queue": "other"}'] == MOST_QUEUES + 9


@pytest.mark.parametrize(
    ("load", "used", "leased", "foreign"),
    [
        (
            {"gpus": {"GPU-box-0": {"freeMib": 900}}, "freeGpus": ["GPU-box-0"], "roomMib": {"GPU-box-0": 1000}},
            100, 0, 0,
        ),
        ({"gpus": {"GPU-box-0": {"freeMib": 100}}, "freeGpus": [], "roomMib": {"GPU-box-0": 0}}, 900, 1000, 0),
        ({"gpus": {"GPU-box-0": {"freeMib": 500}}, "freeGpus": [], "roomMib": {"GPU-box-0": 600}}, 500, 400, 0),
        (
            {
                "gpus": {"GPU-box-0": {"freeMib": 300}},
                "freeGpus": [],
                "roomMib": {"GPU-box-0": 300},
                "foreignMib": {"GPU-box-0": 700},
            },
            700, 0, 700,
        ),
    ],
    ids=["free", "taken whole", "shared", "held back because of others"],
)  # fmt: skip
def test_memory_of_a_gpu(load: dict[str, Any], used: int, leased: int, foreign: int) -> None:
    found = samples(replace(EMPTY, workers=(worker("w1", load=load),)))
    labels = '{"gpu": "GPU-box-0", "model": "a100", "worker": "w1"}'

    def mib(name: str) -> float:
        value = next(found[key] for key in found if key.startswith(f"gpuflow_gpu_memory_{name}_bytes"))
        return value / (1 << 20)

    assert labels.count(":") == 3
    assert (mib("size"), mib("used"), mib("leased"), mib("foreign")) == (1000, used, leased, foreign)


def test_a_gpu_of_two_workers_is_shown_once_as_seen_last() -> None:
    early = worker("w1", load={"gpusSeenAt": 5, "gpus": {"GPU-box-0": {"freeMib": 1000}}})
    late = worker("w2", load={"gpusSeenAt": 9, "gpus": {"GPU-box-0": {"freeMib": 0, "utilizationPercent": 50}}})
    elsewhere = worker("w3", host="other")
    found = samples(replace(EMPTY, workers=(early, late, elsewhere)))
    sizes = [key for key in found if key.startswith("gpuflow_gpu_memory_size_bytes")]
    assert len(sizes) == 2 and not any('"w2"' in key for key in sizes)
    busy = [value for key, value in found.items() if key.startswith("gpuflow_gpu_utilization_ratio")]
    assert busy == [0.5]


def test_the_broker_is_left_out_where_it_may_not_be_asked() -> None:
    assert "gpuflow_broker_memory_used_bytes" not in samples(EMPTY)
    asked = samples(replace(EMPTY, info={"used_memory": 5, "maxmemory": 9, "aof_last_write_status": "err"}))
    assert asked["gpuflow_broker_memory_used_bytes"] == 5 and asked["gpuflow_broker_aof_last_write_ok"] == 0


def test_what_alerts_watch_begins_with_0() -> None:
    found = samples(replace(EMPTY, counts=COUNTS))
    assert found['gpuflow_tasks_total{"queue": "cpu", "state": "DEAD", "type": "echo"}'] == 0
    assert found['gpuflow_repairs_total{"kind": "worker_offline"}'] == 0
    assert (
        samples(replace(EMPTY, repairs={"worker_offline": "3"}))['gpuflow_repairs_total{"kind": "worker_offline"}'] == 3
    )
    assert (
        samples(replace(EMPTY, counts={"started\n\nsft": "1"}))[
            'gpuflow_attempts_total{"outcome": "lost", "type": "sft"}'
        ]
        == 0
    )


def test_a_gpu_without_a_usable_name_is_shown() -> None:
    odd = worker("w1")
    odd.capability["gpus"][0]["names"] = {"short": "a100"}
    assert any('"short"' in name for name in samples(replace(EMPTY, workers=(odd,))))
