"""The pages as rows of HTML: what is read, and by which templates it is rendered. Blocking; run in a thread.

A template escapes every value (tornado's autoescape). `line` makes foreign text one line without control characters;
`raw` is used for our own drawings and times alone. Ages are not rendered: a row that differs every second would be
sent every second; monitor.js turns the times into ages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tornado.template import Loader

from gpuflow.celery_app import GPUFlow
from gpuflow.errors import GPUFlowError
from gpuflow.explaining import explain_queues
from gpuflow.monitor import drawing
from gpuflow.monitor.feeds import Rows
from gpuflow.monitor.reading import MOST_PIPELINE_TASKS, number_of, read_fleet, read_pipeline, read_pipelines
from gpuflow.routing.describe import describe
from gpuflow.routing.requirement import Requirement
from gpuflow.scaling.store import ScalingStore, scaling_status
from gpuflow.terminal import duration, one_line

TEMPLATES: Final = Path(__file__).parent / "templates"
#: Compiles each template once; it may be used by several threads.
_LOADER: Final = Loader(str(TEMPLATES))
#: Most rows of the lists.
MOST_PIPELINES: Final = 100
MOST_DECISIONS: Final = 100
MOST_DEAD: Final = 200
MOST_MESSAGES: Final = 50

#: What the counters of merged calls mean (`gpuflow queues --merged` counts the same).
MERGE_COUNTS: Final[Mapping[str, str]] = {
    "calls": "Calls that could be merged",
    "new": "Runs that were begun for them",
    "coalesced": "Calls answered by the run of an equal call",
    "batched": "Calls that joined the batch of a compatible run",
    "hit": "Calls answered by an earlier result",
    "regrouped": "Runs made of calls that a batch could not answer",
    "saved_generations": "Generations saved",
    "saved_tokens": "Tokens saved",
}


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of the bar: its path, title, template, and what reads its rows."""

    path: str
    title: str
    template: str
    read: Callable[[Renderer, GPUFlow], Rows]


class Renderer:
    """Renders rows. `can_act`: actions are offered, as buttons; `task_path` and the like lead to Flower's pages."""

    def __init__(self, *, can_act: bool, prefix: str = "") -> None:
        self.can_act = can_act
        self.prefix = prefix

    def render(self, template: str, **values: Any) -> str:
        """Return a template with these values."""
        found: bytes = _LOADER.load(template).generate(
            line=one_line, when=when, mib=mib, can_act=self.can_act, prefix=self.prefix, **values
        )
        return found.decode()


def when(at: float | None, *, age: bool = False) -> str:
    """Return a time as HTML; with `age`, the page shows how long ago it was."""
    if not at:
        return ""
    try:
        moment = datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    kind = " data-age" if age else " data-local"
    return f'<time datetime="{moment.isoformat(timespec="seconds")}"{kind}>{moment:%Y-%m-%d %H:%M:%S} UTC</time>'


def mib(amount: int | None) -> str:
    """Return an amount of memory as people read it."""
    if amount is None:
        return "unknown"
    return f"{amount / 1024:.1f} GiB" if amount >= 1024 else f"{amount} MiB"


def fleet_rows(renderer: Renderer, app: GPUFlow) -> Rows:
    """Return the workers, and how many there are of each state."""
    found = read_fleet(app)
    workers = found.workers
    states = Counter(str(one.entry.state) for one in workers)
    gpus = [gpu for one in workers if one.entry.is_there for gpu in one.gpus]
    summary = renderer.render(
        "fleet_summary.html",
        states=sorted(states.items()),
        gpus=len(gpus),
        leased=sum(gpu.leased_mib > 0 for gpu in gpus),
        tasks=sum(len(one.entry.tasks) for one in workers if not one.entry.is_gone),
        disabled=sum(not one.entry.takes_work for one in workers if one.entry.is_there),
    )
    rows = [(one.entry.id, renderer.render("fleet_row.html", row=one, bar=drawing.memory_bar)) for one in workers]
    rows += [(id, renderer.render("unreadable_row.html", id=id)) for id in found.unreadable]
    empty = "No workers are registered. Start one with <code>celery -A gpuflow worker</code>."
    return {"summary": [("summary", summary)], "workers": rows or [_empty(6, empty)]}


def queue_rows(renderer: Renderer, app: GPUFlow) -> Rows:
    """Return the queues with what keeps each, and what merging has done."""
    found = explain_queues(app)
    found.sort(key=lambda row: (not row["waiting"], row["name"].startswith("gpuflow."), row["name"]))
    summary = renderer.render(
        "queues_summary.html",
        waiting=sum(row["waiting"] for row in found),
        running=sum(row["running"] for row in found),
        stuck=sum(bool(row["waiting"]) and not row["workers"] for row in found),
    )
    rows = [(row["name"], renderer.render("queue_row.html", row=row, asks=_asks(row["requirement"]))) for row in found]
    return {"summary": [("summary", summary)], "queues": rows}


def _asks(requirement: Mapping[str, Any] | None) -> str:
    if requirement is None:
        return "plain Celery tasks"
    try:
        return describe(Requirement.from_dict(requirement))
    except (GPUFlowError, KeyError, TypeError, ValueError):
        return "written by a newer version"


def merge_rows(renderer: Renderer, app: GPUFlow) -> Rows:
    """Return the counters of merged calls."""
    counts = app.merger.store.counts()
    names = [*MERGE_COUNTS, *(name for name in counts if name not in MERGE_COUNTS)]
    rows = [
        (
            name,
            renderer.render(
                "merge_row.html", name=name, what=MERGE_COUNTS.get(name, ""), count=f"{counts.get(name, 0):,}"
            ),
        )
        for name in names
    ]
    return {"counts": rows if counts else [_empty(3, "No calls have been merged yet.")]}


def pipeline_rows(renderer: Renderer, app: GPUFlow) -> Rows:
    """Return the newest pipelines."""
    found = read_pipelines(app, MOST_PIPELINES)
    rows = [(one.record.id, renderer.render("pipeline_row.html", row=one, took=_took)) for one in found]
    empty = "No pipelines have been submitted yet. Try <code>gpuflow run quickstart</code>."
    return {"pipelines": rows or [_empty(6, empty)]}


def one_pipeline(renderer: Renderer, app: GPUFlow, pipeline_id: str) -> Rows:
    """Return the parts of one pipeline's page. Raises UnknownTask."""
    page = read_pipeline(app, pipeline_id)
    rows: list[tuple[str, str]] = []
    count = 0
    for stage, node in zip(page.status["stages"], page.nodes, strict=True):
        rows.append((f"stage:{stage['name']}", renderer.render("stage_row.html", stage=stage, note=node.note)))
        for task in stage["tasks"]:
            count += 1
            if count <= MOST_PIPELINE_TASKS:
                rows.append(
                    (f"task:{task['id']}", renderer.render("task_row.html", task=task, progress=_progress(task)))
                )
    log = [
        (key, renderer.render("log_line.html", key=key, at=at, label=label, text=text))
        for key, at, label, text in page.lines
    ]
    chart = drawing.gantt(page.bars, page.now) if page.bars else ""
    loss = drawing.curves(page.losses, "loss") if page.losses else ""
    return {
        "head": [("head", renderer.render("pipeline_head.html", pipeline=page.status, took=_took))],
        "graph": [("graph", drawing.graph(page.nodes))] if page.nodes else [],
        "gantt": [("gantt", chart or "<p>No attempt has started.</p>")],
        "loss": [("loss", loss or "<p>No task has reported a loss.</p>")],
        "stages": rows,
        "log": log,
    }


def _progress(task: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return how far a task is: a share of 1, and as text. What an executor has written may be of any form."""
    progress = task.get("progress")
    if not isinstance(progress, Mapping):
        return None, ""
    current, total = number_of(progress.get("current")), number_of(progress.get("total"))
    metrics = progress.get("metrics")
    parts = [f"{name} {value:.4g}" for name, given in (metrics.items() if isinstance(metrics, Mapping) else ())
             if (value := number_of(given)) is not None]  # fmt: skip
    share = None
    if current is not None:
        counted = f"{current:g}"
        if total is not None and total > 0:
            share = min(1.0, max(0.0, current / total))
            counted += f"/{total:g}"
        parts.insert(0, f"{counted} {progress.get('unit') or 'step'}")
    return share, one_line(", ".join(parts), 200)


def _took(start: float | None, end: float | None) -> str:
    return duration(end - start) if start and end else ""


def scaling_rows(renderer: Renderer, app: GPUFlow) -> Rows:
    """Return what scales the fleet, its machines, what is wanted of each worker, and the newest decisions."""
    status = scaling_status(app.redis, app.keys)
    decisions = ScalingStore(app.redis, app.keys).decisions(MOST_DECISIONS)
    wanted = [one for one in read_fleet(app).workers if not one.entry.is_gone and one.entry.desired.at is not None]
    return {
        "summary": [("summary", renderer.render("scaling_summary.html", status=status))],
        "machines": [(one["id"], renderer.render("machine_row.html", machine=one)) for one in status["machines"]]
        or [_empty(5, "No machines have been launched.")],
        "desired": [(one.entry.id, renderer.render("desired_row.html", entry=one.entry)) for one in wanted]
        or [_empty(4, "Nothing has been ordered of any worker.")],
        "decisions": [
            (key, renderer.render("decision_row.html", key=key, decision=one)) for key, one in _numbered(decisions)
        ]
        or [_empty(4, "Nothing has been decided yet.")],
    }


def dead_rows(renderer: Renderer, app: GPUFlow) -> Rows:
    """Return the dead letters, and the messages that nobody could read."""
    found = app.ledger.dead(MOST_DEAD)
    messages = app.ledger.unreadable(MOST_MESSAGES)
    return {
        "dead": [(one.id, renderer.render("dead_row.html", task=one)) for one in found]
        or [_empty(6, "No dead letters.")],
        "messages": [
            (key, renderer.render("message_row.html", key=key, message=one)) for key, one in _numbered(messages)
        ]
        or [_empty(4, "No such messages.")],
    }


def _numbered(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return entries that have no id, the newest first, with keys that stay when newer ones come before them."""
    seen: Counter[str] = Counter()
    keys = []
    for one in reversed(entries):
        at = str(one.get("at"))
        keys.append((f"{at}:{seen[at]}", one))
        seen[at] += 1
    return keys[::-1]


def _empty(columns: int, text: str) -> tuple[str, str]:
    """Return the row of a table without rows; `text` is HTML of ours."""
    return "empty", f'<tr data-key="empty"><td class="empty" colspan="{columns}">{text}</td></tr>'


PAGES: Final = (
    Page(path="fleet", title="Fleet", template="fleet.html", read=fleet_rows),
    Page(path="queues", title="Queues", template="queues.html", read=queue_rows),
    Page(path="pipelines", title="Pipelines", template="pipelines.html", read=pipeline_rows),
    Page(path="scaling", title="Scaling", template="scaling.html", read=scaling_rows),
    Page(path="dead-letters", title="Dead letters", template="dead.html", read=dead_rows),
    Page(path="merge", title="Merge", template="merge.html", read=merge_rows),
)

__all__ = ["PAGES", "Page", "Renderer", "one_pipeline", "when"]
