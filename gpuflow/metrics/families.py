"""From what was read of a fleet to the metric families of Prometheus. Pure.

Labels are bounded: queues and task types by the Lua steps that count (broker/lua/common.lua), queues that wait now and
workers by MOST_QUEUES and MOST_WORKERS; what is beyond is summed under `other`, or left out where a sum means nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from gpuflow.build import full_version
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.fleet.standing import KINDS, by_kind
from gpuflow.metrics.counters import BUCKETS, FIRST_TOKEN_BUCKETS, durations, parse
from gpuflow.metrics.reading import Readings
from gpuflow.metrics.table import METRICS

#: Series of so many queues and workers at most.
MOST_QUEUES: Final = 500
MOST_WORKERS: Final = 2000
OTHER: Final = "other"
_MIB: Final = 1 << 20

#: Count of the merge layer -> metric.
_MERGE: Final = {
    "calls": "merge_calls",
    "new": "merge_runs",
    "coalesced": "merge_coalesced",
    "batched": "merge_batched",
    "hit": "merge_hits",
    "regrouped": "merge_regrouped",
    "released": "merge_released",
    "saved_generations": "merge_saved_generations",
    "saved_tokens": "merge_saved_tokens",
}
#: What `gpuflow_workers` tells by state.
_AS_STATE: Final = frozenset({"offline", "silent", "draining", "connecting"})
#: What attempts have used -> metric, and how many of the counted unit make one of the metric's.
_USED: Final = {
    "gpu_ms": ("gpu_seconds", 1e3),
    "energy_mj": ("energy_joules", 1e3),
    "cost_millionths": ("cost", 1e6),
    "artifact_bytes": ("artifact_bytes", 1),
}

#: Count of durations -> its histogram, and the bounds of that.
_HISTOGRAMS: Final = {
    "wait": ("task_wait_seconds", BUCKETS),
    "run": ("task_run_seconds", BUCKETS),
    "first": ("served_first_token_seconds", FIRST_TOKEN_BUCKETS),
}

#: Metric -> labels of one sample -> its value.
Found = dict[str, dict[tuple[str, ...], float]]


def families(readings: Readings) -> list[Metric]:
    """Return every metric of the table, those without a sample too."""
    found: Found = defaultdict(dict)
    for part in (_counted, _queues, _workers, _gpus, _merged, _served, _scaling, _state):
        part(readings, found)
    histograms = _histograms(readings)
    metrics: list[Metric] = []
    for name, row in METRICS.items():
        short = name.removeprefix("gpuflow_")
        if row.kind == "info":
            metrics.append(InfoMetricFamily(name, row.text, value={"version": full_version()}))
        elif row.kind == "histogram":
            metrics.append(histograms[short])
        else:
            family = (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(
                name, row.text, labels=row.labels
            )
            for labels, value in sorted(found[short].items()):
                family.add_metric(labels, value)
            metrics.append(family)
    return metrics


def _counted(readings: Readings, found: Found) -> None:
    """Add the counts; what alerts watch begins with 0, since a series that begins with 1 shows no increase."""
    for count in parse(readings.counts):
        if count.name == "submitted":
            found["tasks_submitted"][count.task_type, count.queue] = count.value
            found["tasks"].setdefault(("DEAD", count.task_type, count.queue), 0.0)
        elif count.name == "ended":
            found["tasks"][count.label, count.task_type, count.queue] = count.value
        elif count.name == "started":
            found["attempts_started"][count.task_type,] = count.value
            found["attempts"].setdefault(("lost", count.task_type), 0.0)
        elif count.name == "attempts":
            found["attempts"][count.label, count.task_type] = count.value
        elif count.name == "refused":
            found["messages_refused"][count.label, count.task_type] = count.value
        elif count.name == "calls":
            found["served_calls"][count.task_type, count.label] = count.value
        elif count.name in _USED:
            metric, units = _USED[count.name]
            found[metric][count.task_type,] = count.value / units


def _histograms(readings: Readings) -> dict[str, Metric]:
    """Return the histograms, by task type or model."""
    made: dict[str, Metric] = {}
    counts: dict[tuple[str, str], dict[tuple[str, str], int]] = defaultdict(dict)
    sums: Counter[tuple[str, str]] = Counter()
    for count in parse(readings.counts):
        kind, _, what = count.name.partition("_")
        if what == "bucket":
            counts[kind, count.task_type]["", count.label] = count.value
        elif what == "ms" and kind in _HISTOGRAMS:
            sums[kind, count.task_type] = count.value
    for kind, (name, buckets) in _HISTOGRAMS.items():
        row = METRICS[f"gpuflow_{name}"]
        bounds = [_as_prometheus(bound) for bound in buckets]
        family = HistogramMetricFamily(row.name, row.text, labels=row.labels)
        for (of, task_type), found in sorted(counts.items()):
            if of == kind:
                shown = durations(found, sums[kind, task_type], buckets)
                family.add_metric([task_type], list(zip(bounds, shown.buckets, strict=True)), shown.sum_seconds)
        made[name] = family
    return made


def _as_prometheus(bound: str) -> str:
    return str(floatToGoString(float(bound)))  # type: ignore[no-untyped-call]


def _queues(readings: Readings, found: Found) -> None:
    most_first = sorted(readings.queues, key=lambda queue: (-queue.waiting - queue.running, queue.name))
    for place, queue in enumerate(most_first):
        name = queue.name if place < MOST_QUEUES else OTHER
        tasks, oldest, workers = found["queue_tasks"], found["queue_oldest_seconds"], found["queue_workers"]
        tasks[name, "waiting"] = tasks.get((name, "waiting"), 0) + queue.waiting
        tasks[name, "running"] = tasks.get((name, "running"), 0) + queue.running
        oldest[name,] = max(oldest.get((name,), 0.0), queue.oldest_seconds)
        if name is not OTHER:
            workers[name,] = queue.workers


def _workers(readings: Readings, found: Found) -> None:
    states = Counter(str(worker.state) for worker in readings.workers)
    found["workers"] = {(str(state),): states[str(state)] for state in WorkerState}
    there = [worker for worker in readings.workers if not worker.is_gone]
    standing = by_kind(there)
    found["workers_standing"] = {(kind,): len(standing.get(kind, ())) for kind in KINDS if kind not in _AS_STATE}
    found["workers_disabled"][()] = sum(not worker.takes_work for worker in there)
    found["workers_unreadable"][()] = readings.unreadable_workers
    for worker in there[:MOST_WORKERS]:
        found["worker_heartbeat_age_seconds"][worker.id,] = worker.seen_seconds or 0.0
        found["worker_tasks"][worker.id,] = _number(worker.load.get("jobs")) or 0
        disk = _number(worker.load.get("diskFreeMib"))
        if disk is not None:
            found["worker_disk_free_bytes"][worker.id,] = disk * _MIB


def _gpus(readings: Readings, found: Found) -> None:
    """Add each GPU once: of the workers of a machine, the one that has looked last tells of it."""
    newest: dict[tuple[str, str], tuple[float, str, WorkerEntry]] = {}
    first: dict[tuple[str, str], str] = {}
    for worker in readings.workers[:MOST_WORKERS]:
        if worker.is_gone:
            continue
        for gpu in worker.capability.get("gpus") or ():
            key, at = (worker.hostname, str(gpu.get("uuid"))), _number(worker.load.get("gpusSeenAt")) or 0.0
            first.setdefault(key, worker.id)
            if key not in newest or at > newest[key][0]:
                newest[key] = (at, worker.id, worker)
    for key, (_, _, worker) in newest.items():
        gpu = next(one for one in worker.capability["gpus"] if str(one.get("uuid")) == key[1])
        labels = (first[key], key[1], str(next(iter(gpu.get("names") or [""]))))
        for name, value in _gpu_values(worker.load, gpu).items():
            found[name][labels] = value


def _gpu_values(load: Mapping[str, Any], gpu: Mapping[str, Any]) -> dict[str, float]:
    uuid, size = str(gpu.get("uuid")), _number(gpu.get("total_mib")) or 0.0
    values = {"gpu_memory_size_bytes": size * _MIB}
    now = _of(load.get("gpus"), uuid)
    free = _number(now.get("freeMib")) if isinstance(now, Mapping) else None
    busy = _number(now.get("utilizationPercent")) if isinstance(now, Mapping) else None
    if free is not None:
        values["gpu_memory_used_bytes"] = max(0.0, size - free) * _MIB
    if busy is not None:
        values["gpu_utilization_ratio"] = busy / 100
    foreign = _number(_of(load.get("foreignMib"), uuid)) or 0.0
    values["gpu_memory_foreign_bytes"] = foreign * _MIB
    if isinstance(load.get("freeGpus"), Sequence):
        room = _number(_of(load.get("roomMib"), uuid)) or 0.0
        # A GPU of which nothing is held is free, or was held back because of others.
        held = 0.0 if uuid in load["freeGpus"] or (foreign and room) else max(0.0, size - foreign - room)
        values["gpu_memory_leased_bytes"] = held * _MIB
    return values


def _merged(readings: Readings, found: Found) -> None:
    for name, metric in _MERGE.items():
        found[metric][()] = float(readings.merge.get(name, 0))
    found["merge_kept_results"][()] = readings.merge_kept
    found["merge_kept_result_bytes"][()] = float(readings.merge.get("kept_bytes", 0))


def _served(readings: Readings, found: Found) -> None:
    """Add the served models; their calls begin with 0, so that a first failure is an increase."""
    found["served_models"][()] = len(readings.served)
    for status in readings.served:
        name = status.model.name
        found["served_replicas"][name,] = status.model.replicas
        found["served_replicas_loaded"][name,] = len(status.warm)
        found["served_failures"][name,] = status.failure.count
        for outcome in ("answered", "failed"):
            found["served_calls"].setdefault((name, outcome), 0.0)


def _scaling(readings: Readings, found: Found) -> None:
    for name, amount in readings.scaling.items():
        if ":" not in name and name != "cost":
            found["scaling_actions"][name,] = float(amount)
    found["scaling_leader"][()] = float(readings.is_led)
    machines = Counter((str(one.get("family", "")), str(one.get("state", ""))) for one in readings.machines)
    found["machines"] = {key: float(number) for key, number in machines.items()}
    found["machines_cost_per_hour"][()] = sum(_number(one.get("costPerHour")) or 0.0 for one in readings.machines)
    found["repairs"] = {("worker_offline",): 0.0}  # an alert watches it
    found["repairs"] |= {(kind,): float(number) for kind, number in readings.repairs.items()}
    found["reconciled_timestamp_seconds"][()] = readings.reconciled_at


def _state(readings: Readings, found: Found) -> None:
    found["tasks_unfinished"][()] = readings.unfinished
    found["tasks_delayed"][()] = readings.delayed
    found["dead_letters"][()] = readings.dead
    found["unreadable_messages"][()] = readings.unreadable
    found["leases"][()] = readings.leases
    found["leases_lost"][()] = readings.lost_leases
    told: dict[str, tuple[str, Callable[[Any], float]]] = {
        "used_memory": ("broker_memory_used_bytes", float),
        "maxmemory": ("broker_memory_max_bytes", float),
        "aof_enabled": ("broker_aof_enabled", float),
        "aof_last_write_status": ("broker_aof_last_write_ok", lambda status: float(status == "ok")),
        "connected_clients": ("broker_clients", float),
    }
    for name, (metric, read) in told.items():
        if name in readings.info:
            found[metric][()] = read(readings.info[name])


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _of(mapping: Any, name: str) -> Any:
    return mapping.get(name) if isinstance(mapping, Mapping) else None
