"""Shows a pipeline or a task while somebody waits for it: a live table in a terminal, plain lines anywhere else.

Used by `PipelineRun.wait(progress=True)` and by the command line. It reads events only; it asks the run once, for the
names of its stages. Plain lines are what a log of CI, a pipe and a notebook get.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gpuflow.progress_model import Change, EventLike, ProgressModel, StageProgress, count_text, metric_texts
from gpuflow.terminal import clean, duration, one_line

#: Lines of progress and messages of one stage come at most this often in plain output, in seconds of event time.
PLAIN_SECONDS: Final = 5.0
_REFRESH_PER_SECOND: Final = 8
_BAR_WIDTH: Final = 24
#: Width of everything on a line but the name of the stage and what is told of it.
_OTHER_COLUMNS: Final = _BAR_WIDTH + 24
_DIGITS: Final = re.compile(r"[0-9.,]+")
_MARKS: Final = {
    "PENDING": ("·", ".", "dim"),
    "QUEUED": ("○", "o", "yellow"),
    "SUCCEEDED": ("✔", "+", "green"),
    "FAILED": ("✘", "x", "red"),
    "DEAD": ("✘", "x", "red"),
    "CANCELLED": ("⊘", "-", "yellow"),
    "SKIPPED": ("⊘", "-", "dim"),
}


class TerminalProgress:
    """The progress view of one run (a PipelineRun or a Task): `show` each event, `close` at the end.

    `since` (Unix seconds): in plain output, what happened before is not told again, such as the rounds before a resume.
    """

    def __init__(self, run: Any, *, console: Console | None = None, since: float = 0.0) -> None:
        self.model = model_of(run)
        self.console = console or Console()
        self._since = since
        self._live: Live | None = None
        self._printed_at: dict[tuple[str, str], float] = {}
        self._spinners: dict[str, Spinner] = {}
        self._plain = not self.console.is_terminal or self.console.is_jupyter or self.console.is_dumb_terminal
        self._open = True

    def show(self, event: EventLike) -> None:
        """Take one event."""
        change = self.model.update(event)
        if not self._open:
            return
        if self._plain:
            if change is not None and event.at >= self._since:
                self._print(change, event.at)
        elif self._live is None:
            self._live = Live(
                console=self.console,
                refresh_per_second=_REFRESH_PER_SECOND,
                get_renderable=lambda: render(self.model, self.console, self._spinners),
            )
            self._live.start(refresh=True)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back. May be called twice."""
        self._open = False
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _print(self, change: Change, at: float) -> None:
        # `downloading 43%` and `downloading 44%` are one message, told now and then; another text is told at once.
        what = _DIGITS.sub("", change.text)[:80] if change.kind == "message" else change.kind
        key = (change.stage, what)
        if (
            change.kind != "state"
            and at - self._printed_at.get(key, 0.0) < PLAIN_SECONDS
            and not self._complete(change)
        ):
            return
        self._printed_at[key] = at
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        where = f"{change.stage}: " if change.stage else ""
        line = f"[{clock}] {where}{change.text}"
        self.console.print(clean(line), markup=False, highlight=False, soft_wrap=True)

    def _complete(self, change: Change) -> bool:
        stage = self.model.stages.get(change.stage)
        if change.kind != "progress" or stage is None:
            return False
        current, total, _ = stage.done
        return total is not None and current >= total


def model_of(run: Any) -> ProgressModel:
    """Return the empty model of a pipeline run or of a task."""
    if hasattr(run, "template"):
        return ProgressModel(run.id, [stage.name for stage in run.template().stages])
    record = run.record()
    return ProgressModel.of_task(run.id, one_line(record.name or record.task_type or run.id, 60))


def render(
    model: ProgressModel, console: Console, spinners: dict[str, Spinner], now: Callable[[], float] = time.time
) -> RenderableType:
    """Return the table of all stages; in a low terminal, of those that matter, and a line for the rest.

    `spinners` keeps the spinner of each stage from one call to the next, so that it turns.
    """
    unicode = console.encoding.lower().startswith("utf")
    table = Table.grid(padding=(0, 1))
    for _ in range(6):
        table.add_column(no_wrap=True, overflow="ellipsis")
    stages = list(model.stages.values())
    room = max(3, console.size.height - 3)
    shown = stages
    room_for_detail = max(20, console.width - _OTHER_COLUMNS - max((len(stage.name) for stage in stages), default=0))
    if len(stages) > room:
        shown = [stage for stage in stages if stage.state in ("RUNNING", "QUEUED", "FAILED")][:room]
    for stage in shown:
        spinner = spinners.setdefault(stage.name, Spinner("dots" if unicode else "line", style="cyan"))
        table.add_row(*_row(stage, spinner, unicode, now(), room_for_detail))
    if len(shown) < len(stages):
        done = sum(1 for stage in stages if stage.recorded in ("SUCCEEDED", "SKIPPED"))
        table.add_row("", Text(f"{done} of {len(stages)} stages done", style="dim"))
    return table


def _row(stage: StageProgress, spinner: Spinner, unicode: bool, now: float, room: int) -> list[RenderableType]:
    state = stage.state
    fancy, simple, style = _MARKS.get(state, _MARKS["PENDING"])
    mark: RenderableType = spinner if state == "RUNNING" else Text(fancy if unicode else simple, style=style)
    elapsed = ""
    if stage.started_at is not None:
        elapsed = duration((stage.finished_at or now) - stage.started_at)
    current, total, unit = stage.done
    bar: RenderableType = ""
    counted = ""
    if state == "RUNNING" and total:
        bar = ProgressBar(total=total, completed=min(current, total), width=_BAR_WIDTH)
    if unit and (total or current) and state in ("RUNNING", "SUCCEEDED"):
        counted = count_text(current, total, unit)
    told = stage.error or (stage.message if state == "RUNNING" else "")
    metrics = metric_texts(stage) if state in ("RUNNING", "SUCCEEDED") else []
    detail = "  ".join([*([counted] if bar else []), *metrics, *([told] if told else [])])
    return [
        mark,
        Text(one_line(stage.name, 32), style="bold" if state == "RUNNING" else ""),
        Text(state.lower(), style=_MARKS.get(state, ("", "", "cyan"))[2]),
        Text(elapsed, style="dim"),
        bar if bar else Text(counted),
        Text(one_line(detail, room)),
    ]
