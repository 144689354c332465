"""What the pages show, as plain data: read from Redis by the read models of the library. Blocking; raises redis errors.

Nothing is computed here that `gpuflow workers`, `queues`, `status`, `scaling` or `dead` compute, too: those functions
are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpuflow.celery_app import GPUFlow
from gpuflow.event_text import message
from gpuflow.explaining import server_time
from gpuflow.fleet.registry import UNREADABLE, Fleet, WorkerEntry
from gpuflow.fleet.standing import Standing, standings
from gpuflow.handles import PipelineRun
from gpuflow.ledger.eventlog import LoggedEvent
from gpuflow.monitor.drawing import Bar, Node
from gpuflow.pipelines.records import PipelineRecord
from gpuflow.terminal import clean

#: Tasks that the row of a worker names; the others are counted.
MOST_TASKS: Final = 4
#: Workers that have gone are listed up to so many, those that went last.
MOST_GONE: Final = 50
#: Tasks of a pipeline whose attempts and events are read.
MOST_PIPELINE_TASKS: Final = 200
#: Events of a pipeline that are read at once, of all its tasks together, and of each task at least.
_MOST_EVENTS: Final = 4000
_LEAST_EVENTS: Final = 20
#: Lines of the log's end.
MOST_LINES: Final = 80
#: A number that is not below this is none that anybody counts.
_MOST: Final = 1e300


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """A GPU of a worker. `used_mib` is what all processes use, None: not known; `leased_mib` what gpuflow has given
    to tasks."""

    name: str
    index: int
    total_mib: int
    leased_mib: int
    used_mib: int | None
    foreign_mib: int
    utilization: int | None


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """A worker. `seen_at` is Unix seconds on the server's clock, None: not known."""

    entry: WorkerEntry
    gpus: tuple[GpuRow, ...]
    labels: Mapping[str, str]
    tasks: tuple[tuple[str, str], ...]
    seen_at: int | None
    standings: tuple[Standing, ...]

    @property
    def more_tasks(self) -> int:
        """How many tasks are not named."""
        return len(self.entry.tasks) - len(self.tasks)


@dataclass(frozen=True, kw_only=True)
class FleetRows:
    """The workers, and the ids of those whose entries cannot be read."""

    workers: list[WorkerRow]
    unreadable: list[str]


def read_fleet(app: GPUFlow) -> FleetRows:
    """Return the workers: those that need a look first, then by id, those that have gone last."""
    now = server_time(app)
    fleet = Fleet(app.redis, app.keys)
    entries, unreadable = fleet.readable()
    entries = fleet.as_seen(entries)
    gone = sorted((one for one in entries if one.is_gone), key=lambda one: -one.heartbeat_at)[:MOST_GONE]
    shown = [one for one in entries if not one.is_gone] + gone
    names = app.ledger.names([task for one in shown for task in one.tasks[:MOST_TASKS]])
    rows = []
    for one in shown:
        try:
            rows.append(worker_row(one, names, now))
        except UNREADABLE:
            unreadable.append(one.id)
    rows.sort(key=lambda row: (row.entry.is_gone, not any(one.needs_a_look for one in row.standings), row.entry.id))
    return FleetRows(workers=rows, unreadable=sorted(unreadable))


def worker_row(entry: WorkerEntry, names: Mapping[str, str], now: float) -> WorkerRow:
    """Return what is shown of a worker; what its entry says is another machine's and may be of any form."""
    seen = now - entry.seen_seconds if entry.seen_seconds is not None else entry.heartbeat_at
    labels = entry.capability.get("labels")
    return WorkerRow(
        entry=entry,
        gpus=tuple(_gpu_rows(entry)),
        labels={str(key): str(value) for key, value in labels.items()} if isinstance(labels, Mapping) else {},
        tasks=tuple((task, names.get(task, "")) for task in entry.tasks[:MOST_TASKS]),
        seen_at=round(seen) if seen else None,
        standings=standings(entry),
    )


def _gpu_rows(entry: WorkerEntry) -> Iterable[GpuRow]:
    load = entry.load
    loads, foreign, room = (_mapping(load.get(name)) for name in ("gpus", "foreignMib", "roomMib"))
    free = load.get("freeGpus")
    for gpu in entry.capability.get("gpus") or ():
        uuid, total = str(gpu.get("uuid")), _amount(gpu.get("total_mib")) or 0
        found = _mapping(loads.get(uuid))
        left = _amount(found.get("freeMib"))
        leased = 0
        if isinstance(free, list) and uuid not in free and not entry.is_gone:
            leased = total - min(total, _amount(room.get(uuid)) or 0)
        yield GpuRow(
            name=str((gpu.get("names") or ["GPU"])[0]),
            index=_amount(gpu.get("index")) or 0,
            total_mib=total,
            leased_mib=leased,
            used_mib=None if left is None else max(0, total - left),
            foreign_mib=_amount(foreign.get(uuid)) or 0,
            utilization=_amount(found.get("utilizationPercent")),
        )


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """A pipeline in the list, with how many of its stages have ended."""

    record: PipelineRecord
    ended: int
    stages: int


def read_pipelines(app: GPUFlow, most: int) -> list[PipelineRow]:
    """Return the newest pipelines, the newest first."""
    rows = []
    for record in app.pipelines.recent(most):
        ended = sum(stage.state.final for stage in record.stages.values())
        rows.append(PipelineRow(record=record, ended=ended, stages=max(len(_stages_of(record)), len(record.stages))))
    return rows


def _stages_of(record: PipelineRecord) -> Sequence[Any]:
    stages = record.template.get("stages")
    return stages if isinstance(stages, Sequence) else ()


@dataclass(frozen=True, kw_only=True)
class PipelinePage:
    """One pipeline: its status as `gpuflow status` gives it, and what its page draws of it."""

    status: Mapping[str, Any]
    now: float
    nodes: tuple[Node, ...]
    bars: tuple[Bar, ...]
    losses: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    lines: tuple[tuple[str, float, str, str], ...] = ()  # event id, Unix seconds, label, text


def read_pipeline(app: GPUFlow, pipeline_id: str) -> PipelinePage:
    """Return one pipeline. Raises UnknownTask."""
    status = PipelineRun(pipeline_id, app).status()
    now = server_time(app)
    labels: dict[str, str] = {}
    tasks: dict[str, Mapping[str, Any]] = {}
    for stage in status["stages"]:
        for number, task in enumerate(stage["tasks"]):
            label = f"{stage['name']}/{number}" if len(stage["tasks"]) > 1 else stage["name"]
            # A call that was merged is answered by a run, whose attempts and events are its own.
            source = str(task.get("coalescedInto") if task["state"] == "MERGED" else task["id"])
            labels.setdefault(source, label)
            tasks.setdefault(source, task)
    sources = list(tasks)[:MOST_PIPELINE_TASKS]
    attempts = app.ledger.attempts_of(sources)
    count = max(_LEAST_EVENTS, _MOST_EVENTS // (len(sources) + 1))
    events = app.event_log.newest([pipeline_id, *sources], count)
    bars: list[Bar] = []
    for source in sources:
        bars += [
            Bar(label=labels[source], start=one.started_at, end=one.ended_at, state=one.outcome, note=one.worker)
            for one in attempts[source]
        ]
        bars += _running_bar(labels[source], tasks[source], len(attempts[source]))
    return PipelinePage(
        status=status,
        now=now,
        nodes=tuple(_node(stage) for stage in status["stages"]),
        bars=tuple(bars),
        losses=losses(events, labels),
        lines=tuple(log_lines(events, labels, pipeline_id)),
    )


def _running_bar(label: str, task: Mapping[str, Any], ended: int) -> list[Bar]:
    """Return the bar of the attempt that runs; its entry is written when it ends."""
    if task["state"] not in ("STARTING", "RUNNING") or not task.get("startedAt") or task.get("attempt", 0) <= ended:
        return []
    return [Bar(label=label, start=task["startedAt"], end=None, state="running", note=str(task.get("worker", "")))]


def _node(stage: Mapping[str, Any]) -> Node:
    states = [task["state"] for task in stage["tasks"]]
    note = stage["state"].lower()
    if stage["state"] == "DISPATCHED":
        note = "running" if {"STARTING", "RUNNING"} & set(states) else "queued"
    if len(states) > 1:
        ended = sum(state in ("SUCCEEDED", "FAILED", "CANCELLED", "DEAD") for state in states)
        note += f", {ended} of {len(states)} tasks"
    return Node(name=stage["name"], state=stage["state"], depends_on=tuple(stage["dependsOn"]), note=note)


def losses(events: Iterable[LoggedEvent], labels: Mapping[str, str]) -> dict[str, list[tuple[float, float]]]:
    """Return the losses that tasks have reported: (step, loss) by the label of the task."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        metrics = event.data.get("metrics")
        if event.name != "progress" or not isinstance(metrics, Mapping) or event.source not in labels:
            continue
        step, loss = number_of(event.data.get("current")), number_of(metrics.get("loss"))
        if step is not None and loss is not None:
            points = found.setdefault(labels[event.source], [])
            if points and step <= points[-1][0]:  # another attempt goes back: its curve takes over from there
                points[:] = [point for point in points if point[0] < step]
            points.append((step, loss))
    return found


def log_lines(
    events: Iterable[LoggedEvent], labels: Mapping[str, str], pipeline_id: str
) -> list[tuple[str, float, str, str]]:
    """Return the end of the log: id, time, label and text of each event that has a text."""
    found = []
    for event in events:
        text = message(event.name, event.data)
        if text:
            label = "" if event.source == pipeline_id else labels.get(event.source, "")
            if event.name == "stage":
                label = str(event.data.get("stage", ""))
            found.append((f"{event.source}:{event.id}", event.at, label, clean(text)[-2000:]))
    return found[-MOST_LINES:]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _amount(value: object) -> int | None:
    number = number_of(value)
    return None if number is None else int(number)


def number_of(value: object) -> float | None:
    """Return a finite number of a report that may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _MOST else None


__all__ = [
    "FleetRows",
    "GpuRow",
    "PipelinePage",
    "PipelineRow",
    "WorkerRow",
    "log_lines",
    "losses",
    "number_of",
    "read_fleet",
    "read_pipeline",
    "read_pipelines",
    "worker_row",
]
