"""What `gpuflow executor` shows: the events of a run for people or as lines of JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self

import click

from gpuflow.cli import output
from gpuflow.protocol import Event
from gpuflow.terminal import clean, duration
from gpuflow.worker.standalone import Ended

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Without a terminal, progress is told at most this often, in seconds.
_TELL_SECONDS: Final = 5.0


class EventLines:
    """Every event as one line of JSON on stdout; the last one, `ended`, says how it ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, event: Event) -> None:
        """Print an event."""
        click.echo(event.to_json())

    def end(self, ended: Ended, folder: str) -> None:
        """Print the end."""
        data: dict[str, Any] = {"completed": ended.completed, "output_dir": folder, "artifacts": list(ended.artifacts)}
        if ended.error is not None:
            data["error"] = ended.error
        click.echo(Event(name="ended", data=data).to_json())


class EventView(EventLines):
    """Events for people, on stderr: a bar in a terminal, lines elsewhere; the result goes to stdout."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._told = 0.0
        self._open_line = False
        self._bars: Progress | None = None
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[more]}", markup=False),
            )
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar = self._bars.add_task("", total=None, visible=False, more="")
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._close_line()

    def show(self, event: Event) -> None:
        """Show an event."""
        data = event.data
        if event.name == "progress" and "child" not in data:
            self._progress(data)
        elif event.name == "text_delta" and self._bars is None:
            click.echo(clean(str(data["delta"])), nl=False, err=True)
            self._open_line = True
        elif event.name == "worker":
            self._say(f"{data['status']}: {data['message']}" if data.get("message") else str(data["status"]))
        elif event.name == "log":
            self._say(str(data["message"]))
        elif event.name in ("artifact", "checkpoint"):
            self._say(f"{event.name} {data['path']}")

    def _progress(self, data: Mapping[str, Any]) -> None:
        current, total, unit = data["current"], data.get("total"), data.get("unit") or "step"
        metrics = data.get("metrics")
        more = "  ".join(f"{name} {value}" for name, value in metrics.items()) if isinstance(metrics, Mapping) else ""
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, completed=current, total=total, visible=True, description=unit, more=more)
            return
        now = time.monotonic()
        if current == total or now - self._told >= _TELL_SECONDS:
            self._told = now
            self._say(
                f"{unit} {current}" + (f" of {total}" if total is not None else "") + (f"  {more}" if more else "")
            )

    def _say(self, text: str) -> None:
        self._close_line()
        if self._bars is not None:
            from rich.text import Text

            self._bars.console.print(Text(clean(text)))
        else:
            output.note(text)

    def _close_line(self) -> None:
        if self._open_line:
            click.echo(err=True)
        self._open_line = False

    def end(self, ended: Ended, folder: str) -> None:
        """Print the result, and on stderr how it ended."""
        took = duration(time.monotonic() - self._started)
        if ended.completed:
            output.emit_json(ended.result)
            output.note(f"completed in {took}; its files are in {folder}")
            return
        error = ended.error or {}
        output.note(f"gpuflow: failed after {took}: {error.get('type')}: {error.get('message')}")
