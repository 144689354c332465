"""`gpuflow dead`: tasks that used up their attempts, with what each attempt left behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from gpuflow.cli.errors import DONE, FAILED, bad_input
from gpuflow.cli.options import json_option
from gpuflow.cli.selecting import apart, check_choice, chosen, confirmed, selection_of, selection_options, told_if_cut

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.client import Task
    from gpuflow.ledger.records import AttemptEntry, TaskRecord
    from gpuflow.ledger.selection import Selection

#: So much of a message is shown to people.
_SHOWN_CHARS: Final = 200
_dry_run = click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")


_limit = click.option(
    "-n", "--limit", default=50, show_default=True, type=click.IntRange(1, 10_000), help="How many, newest first."
)


@click.group(invoke_without_command=True, short_help="List, show, retry or purge dead letters.")
@_limit
@selection_options
@json_option
@click.pass_context
def dead(ctx: click.Context, limit: int, filters: Mapping[str, Any], as_json: bool) -> None:
    """List, show, retry or purge the tasks that used up their attempts; the options here are those of `dead list`."""
    if ctx.invoked_subcommand is None:
        _list(limit, filters, as_json)
    elif as_json or any(filters.values()):
        raise bad_input(f"options of `gpuflow dead {ctx.invoked_subcommand}` stand after that word")


@dead.command("list")
@_limit
@selection_options
@json_option
def list_dead(limit: int, filters: Mapping[str, Any], as_json: bool) -> None:
    """List the dead letters, the newest first: all, or those that all given filters select."""
    _list(limit, filters, as_json)


def _list(limit: int, filters: Mapping[str, Any], as_json: bool) -> None:
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.explaining import server_time
    from gpuflow.ledger.states import TaskState

    selection = _of_dead(filters)
    with connected() as app, reachable():
        if selection.is_empty:
            records = app.ledger.dead(limit)
        else:
            records = chosen(app, (), selection, states=[TaskState.DEAD])
            records = sorted(records, key=lambda record: -(record.finished_at or 0.0))[:limit]
        unreadable, now = app.ledger.unreadable(1), server_time(app)
    if as_json:
        output.emit_json([record.public() for record in records])
        return
    output.table(
        ["task", "name", "died", "attempts", "cause"],
        [
            [
                record.id,
                record.name,
                output.age(record.finished_at, now),
                record.attempt,
                (record.error or {}).get("message", ""),
            ]
            for record in records
        ],
        empty="no dead letters" if selection.is_empty else "no dead letters that all of these filters select",
    )
    if unreadable:
        output.note("there are messages that nobody could run; `gpuflow dead messages` shows them")


@dead.command("show")
@click.argument("task_id", metavar="ID")
@json_option
def show_dead(task_id: str, as_json: bool) -> None:
    """Show a dead letter: every attempt, its cause, and the end of its log."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable

    with connected() as app:
        handle = _dead_task(app, task_id)
        record, attempts = handle.record(), handle.attempts()
        with reachable():
            now = app.ledger.now()
    if as_json:
        output.emit_json({**record.public(), "attempts": [entry.public() for entry in attempts]})
        return
    died = output.when_ago(record.finished_at, now)
    output.pairs({"task": record.id, "name": record.name, "queue": record.queue, "died": died})
    output.line()
    print_attempts(attempts, now, logs=True)


@dead.command("retry")
@click.argument("task_ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@selection_options
@_dry_run
@json_option
def retry_dead(
    task_ids: tuple[str, ...], everything: bool, filters: Mapping[str, Any], dry_run: bool, as_json: bool
) -> int:
    """Queue dead letters again, with all attempts before them: those named, or those that all filters select."""
    from gpuflow.cli.session import connected
    from gpuflow.cli.steer import retried

    with connected() as app:
        records = _chosen(app, "retry", task_ids, everything, filters)
        if dry_run and not confirmed(records, "retry", dry_run=True, yes=True, as_json=as_json):
            return DONE
        return retried(app, records, as_json=as_json)


@dead.command("purge")
@click.argument("task_ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@selection_options
@_dry_run
@json_option
def purge_dead(
    task_ids: tuple[str, ...], everything: bool, filters: Mapping[str, Any], dry_run: bool, as_json: bool
) -> int:
    """Forget dead letters: record, events and history. Their results folders are kept."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable

    with connected() as app:
        records = _chosen(app, "purge", task_ids, everything, filters)
        if dry_run and not confirmed(records, "purge", dry_run=True, yes=True, as_json=as_json):
            return DONE
        purged = []
        with told_if_cut(len(records)) as progress, reachable():
            for number, record in enumerate(records, 1):
                purged += [record.id] if app.ledger.purge(record.id) else []
                progress(number)
    if as_json:
        output.emit_json({"purged": purged})
    else:
        output.line(f"{len(purged)} of {len(records)} forgotten")
    return DONE if len(purged) == len(records) else FAILED


@dead.command("messages")
@_limit
@click.option("--purge", is_flag=True, help="Forget them all.")
@json_option
def messages(limit: int, purge: bool, as_json: bool) -> None:
    """Show the messages that no worker could read or run, and why."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.explaining import server_time

    with connected() as app, reachable():
        now = server_time(app)
        found = app.ledger.unreadable(limit)
        forgotten = app.ledger.forget_unreadable() if purge else 0
    if as_json:
        output.emit_json({"forgotten": forgotten} if purge else found)
    elif purge:
        output.line(f"{forgotten} forgotten")
    else:
        output.table(
            ["came", "list", "why", "message"],
            [
                [output.when_ago(one["at"], now), one["list"], one["why"], one["message"][:_SHOWN_CHARS]]
                for one in found
            ],
            empty="no such messages",
        )


def print_attempts(attempts: list[AttemptEntry], now: float, *, logs: bool) -> None:
    """Print how each attempt went, `now` by the server; with `logs` the end of what it had written."""
    from gpuflow.cli import output

    output.table(
        ["attempt", "outcome", "worker", "took", "cause"],
        [
            [
                entry.attempt,
                entry.outcome,
                entry.worker,
                output.span(entry.started_at, entry.ended_at, now),
                (entry.error or {}).get("message", ""),
            ]
            for entry in attempts
        ],
    )
    for entry in attempts if logs else ():
        if entry.log_tail:
            output.line(f"\nlog of attempt {entry.attempt}:\n{entry.log_tail.rstrip()}")


def _chosen(
    app: GPUFlow, verb: str, task_ids: tuple[str, ...], everything: bool, filters: Mapping[str, Any]
) -> list[TaskRecord]:
    """Return the dead letters that a command is about. Raises UnknownTask, click.UsageError."""
    from gpuflow.ledger.states import TaskState

    selection = _of_dead(filters)
    check_choice(f"dead {verb}", task_ids, selection, everything=everything)
    pipelines, _ = apart(app, task_ids)
    if pipelines:
        raise bad_input(f"{pipelines[0].id} is a pipeline; dead letters are tasks: `gpuflow dead list`")
    records = chosen(app, task_ids, selection, states=[TaskState.DEAD])
    for record in records:
        if record.state is not TaskState.DEAD:
            raise bad_input(
                f"{record.id} is {record.state}, not among the dead letters; `gpuflow dead list` shows those"
            )
    return records


def _of_dead(filters: Mapping[str, Any]) -> Selection:
    """Return the filters of a command line. Raises click.UsageError for a state that no dead letter has."""
    from gpuflow.ledger.states import TaskState

    selection = selection_of(filters)
    if selection.states - {TaskState.DEAD}:
        raise bad_input("dead letters are tasks in state DEAD; `gpuflow status --state failed` lists others")
    return selection


def _dead_task(app: GPUFlow, task_id: str) -> Task:
    from gpuflow import client

    handle = client.get(task_id, app=app)
    if isinstance(handle, client.PipelineRun):
        raise bad_input(f"{task_id} is a pipeline; dead letters are tasks: `gpuflow dead list`")
    state = str(handle.record().state)
    if state != "DEAD":
        raise bad_input(f"{task_id} is {state}, not among the dead letters; `gpuflow dead list` shows those")
    return handle
