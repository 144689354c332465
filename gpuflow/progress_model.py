"""What a pipeline or task looks like while somebody watches: events in, the state of each stage out. Pure.

Used by the views in `gpuflow.progress`. It draws nothing and asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from gpuflow.terminal import one_line

#: Metrics worth a place on the line, in this order, with the name that people know them by.
METRICS: Final[Mapping[str, str]] = {
    "loss": "loss",
    "eval_loss": "eval loss",
    "reward": "reward",
    "tokens_per_second": "tokens/s",
}
#: A number that is not below this is none that anybody counts; the arithmetic of views stays finite.
_MOST: Final = 1e300
_COUNT_DIGITS: Final = 10
_FINAL: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "DEAD", "SKIPPED"})

ChangeKind = Literal["state", "progress", "message"]


class EventLike(Protocol):
    """One event of a stream (`ledger.eventlog.LoggedEvent`)."""

    @property
    def id(self) -> str:
        """Its id in the stream."""

    @property
    def source(self) -> str:
        """The task or pipeline that it belongs to."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def data(self) -> Mapping[str, Any]:
        """Its fields."""

    @property
    def at(self) -> float:
        """When it was written, in Unix seconds."""


@dataclass(kw_only=True)
class TaskProgress:
    """One task of a stage."""

    state: str = "QUEUED"
    current: float = 0
    total: float | None = None
    unit: str = "step"
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class StageProgress:
    """One line of the view. Times are Unix seconds of the broker's clock."""

    name: str
    recorded: str = "PENDING"
    tasks: dict[str, TaskProgress] = field(default_factory=dict)
    started_at: float | None = None
    finished_at: float | None = None
    message: str = ""
    error: str = ""

    @property
    def state(self) -> str:
        """PENDING, QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED or SKIPPED."""
        if self.recorded != "DISPATCHED":
            return self.recorded
        states = {task.state for task in self.tasks.values()}
        return "RUNNING" if states - {"PENDING", "QUEUED", "MERGED"} else "QUEUED"

    @property
    def final(self) -> bool:
        """Whether it has ended."""
        return self.recorded in _FINAL

    @property
    def done(self) -> tuple[float, float | None, str]:
        """How far it is: current, total (None: unknown) and unit. Several tasks: each counts as one."""
        tasks = list(self.tasks.values())
        if len(tasks) > 1:
            parts = sum(1.0 if task.state in _FINAL else _share(task) for task in tasks)
            return parts, float(len(tasks)), "task"
        if not tasks:
            return 0, None, ""
        return tasks[0].current, tasks[0].total, tasks[0].unit

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics to show: of one task, or of all the mean (tokens/s: the sum)."""
        shown: dict[str, float] = {}
        for name, label in METRICS.items():
            values = [task.metrics[name] for task in self.tasks.values() if name in task.metrics]
            if values:
                shown[label] = sum(values) if label == "tokens/s" else sum(values) / len(values)
        return shown


def _share(task: TaskProgress) -> float:
    return min(1.0, task.current / task.total) if task.total else 0.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one event changed, as a line for people."""

    stage: str
    kind: ChangeKind
    text: str


class ProgressModel:
    """The stages of one run. An event that was seen before changes nothing."""

    def __init__(self, run_id: str, stages: Iterable[str]) -> None:
        self.run_id = run_id
        self.state = "RUNNING"
        self.stages = {name: StageProgress(name=name) for name in stages}
        self._stage_of: dict[str, StageProgress] = {}
        self._seen: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of_task(cls, task_id: str, name: str) -> ProgressModel:
        """Return the model of a task that belongs to no pipeline: one stage."""
        model = cls("", [name])
        stage = model.stages[name]
        stage.recorded, stage.tasks = "DISPATCHED", {task_id: TaskProgress()}
        model._stage_of[task_id] = stage
        return model

    def update(self, event: EventLike) -> Change | None:
        """Take one event; return what it changed, or None."""
        place = tuple(int(part) for part in event.id.split("-"))
        if place <= self._seen.get(event.source, (-1,)):
            return None
        self._seen[event.source] = place
        if event.source == self.run_id:
            return self._of_run(event)
        stage = self._stage_of.get(event.source)
        return None if stage is None else self._of_task(stage, event)

    def _of_run(self, event: EventLike) -> Change | None:
        if event.name == "stage" and event.data.get("stage") in self.stages:
            return self._of_stage(self.stages[event.data["stage"]], event)
        if event.name == "state":
            self.state = str(event.data.get("state"))
            if self.state == "RUNNING":
                for name, stage in self.stages.items():
                    if stage.recorded != "SUCCEEDED":
                        self.stages[name] = StageProgress(name=name)
            elif self.state == "CANCELLED":
                for stage in self.stages.values():
                    if not stage.final:
                        stage.recorded, stage.finished_at = "CANCELLED", event.at
            resumed = _count(event.data.get("epoch")) > 1
            if self.state in _FINAL or resumed:
                return Change(stage="", kind="state", text="pipeline resumed" if resumed else self._end_text(event))
        return None

    def _end_text(self, event: EventLike) -> str:
        error = _error_text(event.data.get("error"))
        return f"pipeline {self.state.lower()}" + (f": {error}" if error else "")

    def _of_stage(self, stage: StageProgress, event: EventLike) -> Change | None:
        stage.recorded = str(event.data.get("state"))
        if stage.recorded == "DISPATCHED":
            stage.tasks = {str(task): TaskProgress() for task in event.data.get("tasks") or ()}
            stage.started_at, stage.finished_at, stage.error = event.at, None, ""
            self._stage_of.update(dict.fromkeys(stage.tasks, stage))
            count = len(stage.tasks)
            return Change(stage=stage.name, kind="state", text=f"queued ({count} tasks)" if count > 1 else "queued")
        stage.message = ""
        if stage.final:
            stage.finished_at = event.at
            stage.error = _error_text(event.data.get("error")) or one_line(event.data.get("reason") or "", 300)
        text = stage.recorded.lower() + (f": {stage.error}" if stage.error else "")
        return Change(stage=stage.name, kind="state", text=text)

    def _of_task(self, stage: StageProgress, event: EventLike) -> Change | None:
        task = stage.tasks.get(event.source)
        if task is None:
            return None
        if event.name == "state":
            return self._task_state(stage, task, event)
        if event.name == "worker":
            told = one_line(event.data.get("message") or "", 120)
            message = told or one_line(event.data.get("status") or "", 40).replace("_", " ")
            if message and message != stage.message:
                stage.message = message
                if told or message != "working":
                    return Change(stage=stage.name, kind="message", text=message)
        elif event.name == "progress":
            _take_progress(task, event.data)
            return Change(stage=stage.name, kind="progress", text=progress_text(stage))
        return None

    def _task_state(self, stage: StageProgress, task: TaskProgress, event: EventLike) -> Change | None:
        before, task.state = task.state, str(event.data.get("state"))
        alone = len(stage.tasks) == 1
        if task.state == "STARTING":
            task.current, task.total, task.metrics = 0, None, {}
            if alone:
                stage.started_at = event.at
            attempt = _count(event.data.get("attempt"))
            again = f" again (attempt {attempt})" if attempt > 1 else ""
            worker = event.data.get("worker")
            return Change(stage=stage.name, kind="state", text=f"started{again}" + (f" on {worker}" if worker else ""))
        if task.state in _FINAL and not self.run_id:
            stage.recorded, stage.finished_at, stage.message = task.state, event.at, ""
            stage.error = _error_text(event.data.get("error"))
            text = task.state.lower() + (f": {stage.error}" if stage.error else "")
            return Change(stage=stage.name, kind="state", text=text)
        if task.state == "QUEUED" and before != "QUEUED":
            return Change(stage=stage.name, kind="state", text="queued again")
        return None


def _take_progress(task: TaskProgress, data: Mapping[str, Any]) -> None:
    """Take a progress event of any executor; what is no number is passed over."""
    task.current = _number(data.get("current")) or 0.0
    task.total = _number(data.get("total"))
    task.unit = one_line(data.get("unit") or "step", 20)
    metrics = data.get("metrics")
    if isinstance(metrics, Mapping):
        found = {name: _number(metrics.get(name)) for name in METRICS}
        task.metrics.update({name: value for name, value in found.items() if value is not None})


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _MOST else None


def _count(value: object) -> int:
    """Return a count of an event that a child may have written; 1 for what is none."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < _COUNT_DIGITS:
        value = int(value)
    return value if isinstance(value, int) and value > 0 else 1


def _error_text(error: object) -> str:
    return one_line(error.get("message", ""), 300) if isinstance(error, Mapping) else ""


def progress_text(stage: StageProgress) -> str:
    """Return how far a stage is, with its metrics: `12/60 steps, loss 1.23, tokens/s 40`."""
    counted = count_text(*stage.done)
    return ", ".join([*([counted] if counted else []), *metric_texts(stage)])


def count_text(current: float, total: float | None, unit: str) -> str:
    """Return `12/60 steps`, `40.1/92.9 MB`, or an empty text when there is no unit."""
    if not unit:
        return ""
    if unit == "byte":
        return f"{current / 1e6:.1f}/{total / 1e6:.1f} MB" if total else f"{current / 1e6:.1f} MB"
    counted = f"{current:g}/{total:g}" if total else f"{current:g}"
    return f"{counted} {unit}{'' if (total or current) == 1 else 's'}"


def metric_texts(stage: StageProgress) -> list[str]:
    """Return the metrics of a stage as short texts."""
    return [
        f"{label} {value:.0f}" if label == "tokens/s" and value >= 10 else f"{label} {value:.4g}"
        for label, value in stage.metrics.items()
    ]
