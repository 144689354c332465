"""`gpuflow logs`: what a run has told, from the event streams."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

import click

from gpuflow.cli.errors import DONE, interrupted
from gpuflow.cli.options import json_option

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.client import PipelineRun, Task
    from gpuflow.ledger.eventlog import LoggedEvent

#: How long to wait for what is there already, in seconds.
_AT_ONCE_SECONDS: Final = 0.001


@click.command(short_help="Show what a pipeline or task has told.")
@click.argument("record_id", metavar="ID")
@click.option("--follow", "-f", "following", is_flag=True, help="Go on to the end of the run.")
@json_option
def logs(record_id: str, following: bool, as_json: bool) -> int:
    """Show the events and log lines of a task, or of all tasks of a pipeline, in order.

    With -f and --json: one JSON object a line.
    """
    from gpuflow import client
    from gpuflow.cli import output, watch
    from gpuflow.cli.session import connected

    with connected() as app:
        handle = client.get(record_id, app=app)
        labels = Labels(handle)
        if not following:
            events = stored(app, handle)
            if as_json:
                output.emit_json([labels.plain(event) for event in events])
            else:
                _print(labels, events)
            return DONE
        try:
            if as_json:
                for event in watch.follow(app, handle):
                    output.line(json.dumps(labels.plain(event)))
            else:
                _print(labels, watch.follow(app, handle))
        except KeyboardInterrupt as error:
            output.note(f"stopped; nothing was cancelled: `gpuflow logs {record_id} -f` goes on")
            return interrupted(error)
    return DONE


class Labels:
    """Knows which stage an event belongs to; learns it from the events of the pipeline."""

    def __init__(self, handle: PipelineRun | Task) -> None:
        self._run_id = handle.id
        self._stage_of: dict[str, str] = {}
        self._alone = not hasattr(handle, "template")
        if self._alone:
            record = handle.record()
            self._stage_of[handle.id] = getattr(record, "stage", None) or record.name or handle.id[:8]

    def of(self, event: LoggedEvent) -> str:
        """Return `stage`, or `stage/number` where a stage has several tasks; empty for the pipeline itself."""
        if event.name == "stage" and event.source == self._run_id:
            stage, tasks = str(event.data.get("stage")), list(event.data.get("tasks") or ())
            for number, task in enumerate(tasks):
                self._stage_of[str(task)] = f"{stage}/{number}" if len(tasks) > 1 else stage
            return stage
        if event.source == self._run_id and not self._alone:
            return ""
        return self._stage_of.get(event.source, event.source[:8])

    def plain(self, event: LoggedEvent) -> dict[str, Any]:
        """Return the event as JSON-able data."""
        return {
            "id": event.id,
            "at": event.at,
            "source": event.source,
            "stage": self.of(event),
            "event": event.name,
            **{key: value for key, value in event.data.items() if key not in ("id", "at", "source", "stage", "event")},
        }


def stored(app: GPUFlow, handle: PipelineRun | Task) -> list[LoggedEvent]:
    """Return all events of a run and of every task that it ever had, in order."""
    from gpuflow.client import reachable
    from gpuflow.ledger.eventlog import EventCursor

    with reachable():
        cursor = EventCursor(app.event_log, [handle.id])
        events: list[LoggedEvent] = []
        while page := cursor.wait(_AT_ONCE_SECONDS):
            events += page
            for event in page:
                if event.name == "stage":
                    for task in event.data.get("tasks") or ():
                        cursor.add(str(task))
    return sorted(events, key=lambda event: tuple(int(part) for part in event.id.split("-")))


def _print(labels: Labels, events: Any) -> None:
    from gpuflow.cli import output
    from gpuflow.event_text import message

    for event in events:
        label = labels.of(event)
        text = message(event.name, event.data)
        if text is None:
            continue
        clock = time.strftime("%H:%M:%S", time.localtime(event.at))
        for part in text.splitlines() or [""]:
            output.line(f"[{clock}] {label + ' ' if label else ''}{part}")
