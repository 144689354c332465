"""Follows a pipeline or task to its end, whatever the broker does in between.

Used by the commands that wait. Interrupting it cancels nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from gpuflow.cli.errors import DONE, FAILED
from gpuflow.errors import BrokerUnavailable

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.client import PipelineRun, Task
    from gpuflow.ledger.eventlog import EventCursor, LoggedEvent

#: How long a broker may be away while somebody watches, in seconds.
PATIENCE_SECONDS: Final = 60.0
_SLICE_SECONDS: Final = 1.0


def follow(
    app: GPUFlow, handle: PipelineRun | Task, *, tick: Callable[[], None] = lambda: None
) -> Iterator[LoggedEvent]:
    """Yield the events of a run from the first on, until it has ended and all are told.

    `tick` is called at least once a second, also while nothing happens. Raises BrokerUnavailable when the broker has
    been away too long, UnknownTask, and what `tick` raises.
    """
    from gpuflow.cli.output import note
    from gpuflow.client import reachable
    from gpuflow.ledger.eventlog import EventCursor

    cursor = EventCursor(app.event_log, [handle.id])
    away_since: float | None = None
    while True:
        tick()
        try:
            with reachable():
                ended = _look(app, handle, cursor)
                events = cursor.wait(0.001 if ended else _SLICE_SECONDS)
        except BrokerUnavailable as error:
            if away_since is None:
                away_since = time.monotonic()
                note(f"the broker does not answer ({error.__cause__}); waiting {PATIENCE_SECONDS:g} s for it")
            if time.monotonic() - away_since > PATIENCE_SECONDS:
                raise
            time.sleep(_SLICE_SECONDS / 4)
            continue
        if away_since is not None:
            away_since = None
            note("the broker answers again")
        yield from events
        if ended and not events:
            return


def _look(app: GPUFlow, handle: Any, cursor: EventCursor) -> bool:
    """Add the streams of tasks that are new; say whether the run has ended."""
    record = app.pipelines.find(handle.id)
    if record is None:
        return app.ledger.get(handle.id).state.final
    for stage in record.stages.values():
        for task_id in stage.tasks:
            cursor.add(task_id)
    return record.state.final


def show(
    app: GPUFlow,
    handle: PipelineRun | Task,
    *,
    on_stderr: bool = False,
    since: float = 0.0,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Show the progress of a run until its end."""
    from rich.console import Console

    from gpuflow.progress import TerminalProgress

    view = TerminalProgress(handle, console=Console(stderr=on_stderr), since=since)
    try:
        for event in follow(app, handle, tick=tick):
            view.show(event)
    finally:
        view.close()


def verdict(handle: PipelineRun | Task) -> int:
    """Return the exit code of an ended run, and tell on stderr why it failed."""
    from gpuflow.cli.output import note

    record = handle.record()
    if str(record.state) == "SUCCEEDED":
        return DONE
    message = str((record.error or {}).get("message") or f"{handle.id} ended {record.state}")
    note(f"gpuflow: {message}; `gpuflow logs {handle.id}` tells more")
    return FAILED


def kept_going(handle_id: str) -> str:
    """Return what to tell when somebody stops watching."""
    return f"stopped watching; nothing was cancelled: `gpuflow status {handle_id} --watch` watches again"
