"""`gpuflow status --watch` without an id: the fleet as it is now, again and again, until Ctrl-C.

In a terminal a live view; anywhere else one line whenever something has changed. The same data as `gpuflow workers`,
`gpuflow queues` and the metrics; it changes nothing.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpuflow.errors import BrokerUnavailable
from gpuflow.terminal import clean, duration, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpuflow.celery_app import GPUFlow
    from gpuflow.fleet.registry import WorkerEntry
    from gpuflow.ledger.records import TaskRecord

#: The fleet is read this often, in seconds; plain lines come at most this often.
REFRESH_SECONDS: Final = 2.0
#: Rates are those of the last so many seconds.
RATE_SECONDS: Final = 60.0
#: Rows of each table at most.
MOST_ROWS: Final = 15
#: What keeps workers from work that their states do not tell.
_COUNTED: Final = ("disabled", "disk-full")
#: How long a broker may be away while somebody watches, in seconds.
PATIENCE_SECONDS: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class FleetLook:
    """The fleet at one moment. `ended` counts tasks by final state since the fleet began; `now` is by the server;
    `unreadable` workers have entries that this version cannot read, and are in nothing else.
    """

    now: float
    workers: Sequence[WorkerEntry]
    queues: Sequence[Mapping[str, Any]]
    running: Sequence[TaskRecord]
    running_count: int
    ended: Mapping[str, int]
    unreadable: int = 0


class Rates:
    """How many tasks have ended in a minute, by state, over the looks of the last RATE_SECONDS."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, Mapping[str, int]]] = []

    def per_minute(self, look: FleetLook) -> dict[str, float]:
        """Return the rates with this look; empty at the first one."""
        self._looks.append((look.now, look.ended))
        while len(self._looks) > 2 and look.now - self._looks[1][0] >= RATE_SECONDS:
            self._looks.pop(0)
        began, before = self._looks[0]
        if look.now <= began:
            return {}
        minutes = (look.now - began) / 60
        return {state: max(0, count - before.get(state, 0)) / minutes for state, count in look.ended.items()}


def read(app: GPUFlow) -> FleetLook:
    """Read the fleet. Raises redis errors."""
    from gpuflow.fleet.queue_rows import queue_rows
    from gpuflow.fleet.registry import Fleet
    from gpuflow.metrics.counters import parse

    client: Any = app.redis
    seconds, micros = client.time()
    fleet = Fleet(client, app.keys)
    entries, unreadable = fleet.readable()
    workers = [one for one in fleet.as_seen(entries) if not one.is_gone]
    ids = sorted({task for worker in workers for task in worker.tasks})
    ended: Counter[str] = Counter()
    for count in parse(client.hgetall(app.keys.metrics)):
        if count.name == "ended":
            ended[count.label] += count.value
    return FleetLook(
        now=seconds + micros / 1e6,
        workers=workers,
        queues=queue_rows(client, app.keys, app.settings.task_topic),
        running=app.ledger.as_seen(app.ledger.find_many(ids[:MOST_ROWS])),
        unreadable=len(unreadable),
        running_count=len(ids),
        ended=ended,
    )


def summary(look: FleetLook, rates: Mapping[str, float]) -> str:
    """Return the fleet in one line; a worker is counted with its state, and with what keeps it from work beside."""
    from gpuflow.fleet.standing import standings

    states = Counter(str(worker.state).lower() for worker in look.workers)
    states.update(one.label for worker in look.workers for one in standings(worker) if one.kind in _COUNTED)
    states.update({"unreadable": look.unreadable} if look.unreadable else {})
    workers = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    waiting = sum(int(queue["waiting"]) for queue in look.queues)
    ended = ", ".join(f"{count} {state.lower()}" for state, count in sorted(look.ended.items())) or "none"
    parts = [f"workers: {workers}", f"waiting: {waiting}", f"running: {look.running_count}", f"ended: {ended}"]
    if shown := ", ".join(f"{rate:.1f} {state.lower()}" for state, rate in sorted(rates.items()) if rate):
        parts.append(f"a minute: {shown}")
    return " | ".join(parts)


def view(look: FleetLook, rates: Mapping[str, float], away: str = "") -> RenderableType:
    """Return the live view; `away` says that the broker does not answer, and stands above what it said last."""
    from rich.console import Group
    from rich.text import Text

    from gpuflow.cli.fleet import by_need, gpu_text, queue_cells
    from gpuflow.fleet.standing import state_text

    workers = [
        [
            one.id,
            state_text(one),
            gpu_text(one),
            _gpus_in_use(one),
            len(one.tasks),
            f"{one.seen_seconds or 0:.0f} s ago",
        ]
        for one in look.workers
    ]
    queues = [
        [*queue_cells(row, look.now), row["running"], len(row["workers"]) or "none"]
        for row in by_need([row for row in look.queues if row["waiting"] or row["running"]])
    ]
    tasks = [
        [one.id, one.name, str(one.state), one.worker or "", _took(one, look.now), _progress(one)]
        for one in look.running
    ]
    at = time.strftime("%H:%M:%S", time.localtime(look.now))
    return Group(
        *([Text(away, style="bold red")] if away else []),
        Text(f"{at}  {summary(look, rates)}", style="bold"),
        _table("worker,state,gpus,in use,tasks,seen", workers, len(workers)),
        _table("queue,waiting,oldest,running,workers", queues, len(queues)),
        _table("task,name,state,worker,took,progress", tasks, look.running_count),
        Text("Ctrl-C ends the view and changes nothing", style="dim"),
    )


def _table(headers: str, rows: Sequence[Sequence[object]], total: int) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from gpuflow.cli.output import style_of

    left = total - min(total, MOST_ROWS)
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", caption=f"{left} more" if left else None)
    for header in headers.split(","):
        shown.add_column(header, no_wrap=True)
    for row in rows[:MOST_ROWS]:
        cells = [one_line(cell, 60) for cell in row]
        shown.add_row(*(Text(cell, style=style_of(cell)) for cell in cells))
    return shown


def _gpus_in_use(worker: WorkerEntry) -> str:
    total, free = len(worker.capability.get("gpus") or ()), worker.load.get("freeGpus")
    busy = [now.get("utilizationPercent") for now in (worker.load.get("gpus") or {}).values()]
    known = [percent for percent in busy if isinstance(percent, int | float)]
    if not total or not isinstance(free, list):
        return ""
    load = f", {sum(known) / len(known):.0f} %" if known else ""
    return f"{total - len(free)} of {total}{load}"


def _took(task: TaskRecord, now: float) -> str:
    return "" if task.started_at is None else duration(max(0.0, now - task.started_at))


def _progress(task: TaskRecord) -> str:
    progress = task.progress or {}
    return f"{progress.get('current', 0):g}/{progress['total']:g}" if progress.get("total") else ""


def away_text(seconds: float) -> str:
    """Return what is said of a broker that has been away for so long."""
    since = f"has not answered for {seconds:.0f} s" if seconds >= 1 else "does not answer"
    return f"the broker {since}; what stands here is what it said before"


def looks(
    app: GPUFlow,
    away: Callable[[float], object],
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[FleetLook]:
    """Yield the fleet again and again; `away` is called with the seconds whenever the broker has not answered.

    Raises BrokerUnavailable when it has been away for PATIENCE_SECONDS.
    """
    from gpuflow.client import reachable

    away_since: float | None = None
    while True:
        try:
            with reachable():
                look = read(app)
        except BrokerUnavailable:
            away_since = clock() if away_since is None else away_since
            if clock() - away_since > PATIENCE_SECONDS:
                raise
            away(clock() - away_since)
        else:
            away_since = None
            yield look
        wait(REFRESH_SECONDS)


def watch_fleet(app: GPUFlow) -> None:
    """Show the fleet until the process is interrupted."""
    if not sys.stdout.isatty():
        _plain(app)
        return
    from rich.console import Console
    from rich.live import Live

    rates = Rates()
    last: FleetLook | None = None
    with Live(console=Console(), screen=True, auto_refresh=False) as live:

        def away(seconds: float) -> None:
            if last is not None:
                live.update(view(last, {}, away_text(seconds)), refresh=True)

        for look in looks(app, away):
            last = look
            live.update(view(look, rates.per_minute(look)), refresh=True)


def _plain(app: GPUFlow) -> None:
    from gpuflow.cli.output import line

    last = ""

    def away(seconds: float) -> None:
        nonlocal last
        if last:  # once; the next look is told again
            line(f"{time.strftime('%H:%M:%S')}  {away_text(seconds)}")
            sys.stdout.flush()
            last = ""

    for look in looks(app, away):
        text = clean(summary(look, {}))
        if text != last:
            line(f"{time.strftime('%H:%M:%S', time.localtime(look.now))}  {text}")
            sys.stdout.flush()
            last = text
