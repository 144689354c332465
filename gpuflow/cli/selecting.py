"""Filters over tasks as options, shared by `gpuflow status`, `cancel`, `retry` and `dead`, and what they select."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from gpuflow.cli.errors import bad_input

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.client import PipelineRun
    from gpuflow.ledger.records import TaskRecord
    from gpuflow.ledger.selection import Selection
    from gpuflow.ledger.states import TaskState
    from gpuflow.pipelines.records import PipelineRecord

#: So many tasks are listed before anything is done to them; the rest is counted.
_SHOWN: Final = 20
#: Characters of such a line.
_WIDEST: Final = 300

_OPTIONS: Final = (
    click.option("--state", "states", multiple=True, metavar="STATE", help="In this state, as QUEUED (repeatable)."),
    click.option("--owner", metavar="OWNER", help="Of this owner."),
    click.option("--name", metavar="GLOB", help="Whose name fits."),
    click.option("--queue", metavar="GLOB", help="Of a queue whose name fits."),
    click.option("--worker", metavar="GLOB", help="On a worker, or last on one, whose name fits."),
    click.option("--pipeline", metavar="ID", help="Of this pipeline."),
    click.option("--label", "labels", multiple=True, metavar="K=GLOB", help="Whose metadata.labels fit (repeatable)."),
    click.option("--older-than", metavar="TIME", help="Submitted longer ago than this, as 90s, 2h or 3d."),
    click.option("--newer-than", metavar="TIME", help="Submitted within this time."),
)


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the filters; the command gets them as `filters`, a mapping for `selection_of`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        names = ("states", "owner", "name", "queue", "worker", "pipeline", "labels", "older_than", "newer_than")
        return command(filters={name: given.pop(name) for name in names}, **given)

    for option in reversed(_OPTIONS):
        option(wrapped)
    return wrapped


def selection_of(filters: Mapping[str, Any]) -> Selection:
    """Return the filters of a command line. Raises click.UsageError."""
    from gpuflow.ledger.selection import Selection

    return Selection(
        states=frozenset(_state(text) for text in filters["states"]),
        owner=filters["owner"],
        name=filters["name"],
        queue=filters["queue"],
        worker=filters["worker"],
        pipeline=filters["pipeline"],
        labels=dict(_label(text) for text in filters["labels"]),
        older_seconds=_seconds("--older-than", filters["older_than"]),
        newer_seconds=_seconds("--newer-than", filters["newer_than"]),
    )


def _state(text: str) -> TaskState:
    from gpuflow.ledger.states import TaskState

    try:
        return TaskState(text.strip().upper())
    except ValueError:
        raise bad_input(f"--state {text!r} is no state of a task; there are {', '.join(TaskState)}") from None


def _label(text: str) -> tuple[str, str]:
    name, separator, glob = text.partition("=")
    if not name:
        raise bad_input(f"--label {text!r} names no label; write --label NAME=GLOB, or --label NAME for any value")
    return name, glob if separator else "*"


def _seconds(option: str, text: str | None) -> float | None:
    from gpuflow.spec.units import duration_seconds

    if text is None:
        return None
    try:
        return duration_seconds(text)
    except ValueError as error:
        raise bad_input(f"{option} {text!r} {error}") from None


def check_choice(command: str, ids: Sequence[str], selection: Selection, *, everything: bool) -> None:
    """Check that a command is told what to act on, in one way. Raises click.UsageError."""
    if ids and (everything or not selection.is_empty):
        raise bad_input(f"name the tasks, or choose them by filters, not both; see `gpuflow {command} --help`")
    if not ids and not everything and selection.is_empty:
        raise bad_input(f"name the tasks, choose them by filters such as --owner, or --all: `gpuflow {command} ID`")


def apart(app: GPUFlow, record_ids: Sequence[str], *, steers: bool = True) -> tuple[list[PipelineRun], list[str]]:
    """Return the pipelines among some ids, and the ids of tasks. Raises UnknownTask, naming what is neither."""
    from gpuflow.client import PipelineRun, reachable
    from gpuflow.errors import UnknownTask

    ids = list(dict.fromkeys(record_ids))
    with reachable():
        heads = dict(zip(ids, app.ledger.heads(ids), strict=True))
        others = [id for id, head in heads.items() if head is None]
        found = dict(zip(others, app.pipelines.find_many(others), strict=True))
    missing = [id for id, pipeline in found.items() if pipeline is None]
    if missing:
        named = ", ".join(repr(id) for id in missing[:_SHOWN]) + (" ..." if len(missing) > _SHOWN else "")
        undone = "nothing was done: " if steers else ""
        raise UnknownTask(f"no task or pipeline {named}; {undone}`gpuflow status` lists those of this fleet")
    return [PipelineRun(id, app) for id in others], [id for id, head in heads.items() if head is not None]


@contextmanager
def told_if_cut(total: int) -> Iterator[Callable[[int], None]]:
    """Give what takes the number of tasks that are done; where the broker goes away, or Ctrl-C comes, tell it."""
    from gpuflow.cli import output
    from gpuflow.errors import BrokerUnavailable

    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done = count

    try:
        yield progress
    except (BrokerUnavailable, KeyboardInterrupt):
        output.note(f"stopped after {done} of {total} tasks: what was done stays, and the same command does the rest")
        raise


def chosen(
    app: GPUFlow,
    task_ids: Sequence[str],
    selection: Selection,
    *,
    states: Iterable[TaskState],
) -> list[TaskRecord]:
    """Return the tasks that a command is to act on: those named, or those selected.

    `states` are those on which the command can act: of a selection that names none, only tasks in these are taken.
    Raises UnknownTask for a name without a task.
    """
    from gpuflow.client import reachable
    from gpuflow.errors import UnknownTask
    from gpuflow.ledger.selection import select

    ledger = app.ledger
    with reachable():
        if not task_ids:
            wanted = selection if selection.states else replace(selection, states=frozenset(states))
            return select(ledger, wanted)
        ids = list(dict.fromkeys(task_ids))
        records = ledger.heads(ids)
        missing = [id for id, record in zip(ids, records, strict=True) if record is None]
        if missing:
            raise UnknownTask(f"no task {', '.join(missing)}; `gpuflow status` lists those of this fleet")
        return ledger.as_seen(records)


def confirmed(
    records: Sequence[TaskRecord],
    verb: str,
    *,
    pipelines: Sequence[PipelineRecord] = (),
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> bool:
    """Show what is about to be done to several tasks and pipelines, and ask for it in a terminal; say whether to go on.

    Nothing is asked with `yes`, of one task, or where nobody sits at a terminal. With `dry_run` nothing goes on.
    """
    from gpuflow.cli import output
    from gpuflow.terminal import one_line

    if dry_run and as_json:
        shown = {"tasks": [record.public() for record in records], "pipelines": [one.public() for one in pipelines]}
        output.emit_json({"dryRun": True, **shown})
        return False
    several = len(records) + len(pipelines) > 1
    asks = not yes and not as_json and several and sys.stdin.isatty() and sys.stderr.isatty()
    if dry_run or asks:
        show = output.line if dry_run else output.note
        for one in pipelines:
            show(one_line(f"{one.id}  {one.state}  {one.name}  {one.owner}  pipeline", _WIDEST))
        for record in records[:_SHOWN]:
            show(one_line(f"{record.id}  {record.state}  {record.name}  {record.owner}  {record.queue}", _WIDEST))
        if len(records) > _SHOWN:
            show(f"and {len(records) - _SHOWN} more")
    counted = f"{len(records)} tasks" + (f" and {len(pipelines)} pipelines" if pipelines else "")
    if dry_run:
        output.note(f"would {verb} {counted}; nothing was done")
        return False
    if asks:
        click.confirm(f"{verb} {counted}?", abort=True, err=True)
    return True
