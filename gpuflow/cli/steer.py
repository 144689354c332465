"""`gpuflow cancel` and `gpuflow retry`: one run, several, or all that filters select."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpuflow.cli.errors import DONE, FAILED, bad_input
from gpuflow.cli.options import json_option
from gpuflow.cli.selecting import apart, check_choice, chosen, confirmed, selection_of, selection_options, told_if_cut

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.ledger.records import TaskRecord

#: Pipelines that a line names.
_MOST_NAMED = 5

_dry_run = click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
_yes = click.option("--yes", "-y", is_flag=True, help="Do not ask, also in a terminal.")


@click.command(short_help="Cancel pipelines and tasks.")
@click.argument("record_ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All tasks that have not ended.")
@selection_options
@_dry_run
@_yes
@json_option
def cancel(
    record_ids: tuple[str, ...], everything: bool, filters: Mapping[str, Any], dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Cancel tasks, or all of a pipeline that has not ended: those named, or those that all given filters select.

    What has ended is kept. A cancelled task of a pipeline fails the pipeline; `gpuflow resume` runs it again.
    """
    from gpuflow.bulk import cancel_many
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.ledger.states import TaskState

    selection = selection_of(filters)
    check_choice("cancel", record_ids, selection, everything=everything)
    with connected() as app:
        if len(record_ids) == 1 and not dry_run:
            return _cancel_one(app, record_ids[0], as_json=as_json)
        pipelines, task_ids = apart(app, record_ids)
        records: list[TaskRecord] = []
        if task_ids or not pipelines:
            open_states = [state for state in TaskState if not state.final]
            records = chosen(app, task_ids, selection, states=open_states)
        if not confirmed(
            records,
            "cancel",
            pipelines=[one.record() for one in pipelines],
            dry_run=dry_run,
            yes=yes,
            as_json=as_json,
        ):
            return DONE
        verdicts = {one.id: "cancelled" if one.cancel() else "final" for one in pipelines}
        with told_if_cut(len(records)) as progress:
            # The oldest stand where the server looks first, and would be begun next.
            verdicts |= cancel_many(app, _oldest_first(records), progress=progress)
    if as_json:
        output.emit_json({"verdicts": verdicts})
    else:
        count = Counter(verdicts.values())
        output.line(
            f"{count['cancelled']} cancelled; {count['requested']} are stopped by their workers now; "
            f"{count['final'] + count['unknown']} had ended before"
        )
    return DONE


def _cancel_one(app: GPUFlow, record_id: str, *, as_json: bool) -> int:
    from gpuflow import client
    from gpuflow.cli import output

    handle = client.get(record_id, app=app)
    if isinstance(handle, client.PipelineRun):
        verdict = "cancelled" if handle.cancel() else "final"
    else:
        verdict = handle.cancel()
    state = str(handle.record().state)
    if as_json:
        output.emit_json({"id": record_id, "verdict": verdict, "state": state})
        return DONE
    output.line(
        {
            "cancelled": f"{record_id} is cancelled",
            "requested": f"its worker stops {record_id}; `gpuflow status {record_id} --watch` shows the end",
            "final": f"{record_id} had ended before ({state}); nothing to cancel",
        }[verdict]
    )
    return DONE


@click.command(short_help="Queue ended tasks again.")
@click.argument("task_ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All tasks that failed or died.")
@selection_options
@_dry_run
@_yes
@json_option
def retry(
    task_ids: tuple[str, ...], everything: bool, filters: Mapping[str, Any], dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Queue tasks that failed, died or were cancelled again, under their ids: those named, or those selected.

    Filters without --state select tasks that failed or died; cancelled ones only with `--state cancelled`.
    """
    from gpuflow.cli.session import connected
    from gpuflow.ledger.states import TaskState

    selection = selection_of(filters)
    check_choice("retry", task_ids, selection, everything=everything)
    with connected() as app:
        if len(task_ids) == 1 and not dry_run:
            return _retry_one(app, task_ids[0], as_json=as_json)
        pipelines, only_tasks = apart(app, task_ids)
        if pipelines:
            raise bad_input(f"{pipelines[0].id} is a pipeline; `gpuflow resume {pipelines[0].id}` runs the rest of it")
        failed = (TaskState.FAILED, TaskState.DEAD)
        records = chosen(app, only_tasks, selection, states=failed)
        if not confirmed(records, "retry", dry_run=dry_run, yes=yes, as_json=as_json):
            return DONE
        return retried(app, records, as_json=as_json)


def retried(app: GPUFlow, records: Sequence[TaskRecord], *, as_json: bool) -> int:
    """Queue ended tasks again, the oldest first, tell what came of it, and return the exit code. Raises
    BrokerUnavailable."""
    from gpuflow.bulk import retry_many
    from gpuflow.cli import output

    with told_if_cut(len(records)) as progress:
        verdicts = retry_many(app, _oldest_first(records), progress=progress)
    queued = [task_id for task_id, verdict in verdicts.items() if verdict == "queued"]
    if as_json:
        output.emit_json({"queued": queued, "verdicts": verdicts})
    else:
        output.line(f"{len(queued)} of {len(verdicts)} queued again")
        for verdict, count in Counter(verdict for verdict in verdicts.values() if verdict != "queued").items():
            output.note(f"not tried again: {count} ({verdict})")
        note_pipelines([record for record in records if verdicts[record.id] == "queued"])
    return DONE if len(queued) == len(verdicts) else FAILED


def _oldest_first(records: Sequence[TaskRecord]) -> list[str]:
    return [record.id for record in sorted(records, key=lambda record: record.created_at)]


def note_pipelines(records: Sequence[TaskRecord]) -> None:
    """Say on standard error which of these tasks are part of a pipeline, which has ended: no task begins it again."""
    from gpuflow.cli import output

    pipelines = sorted({record.pipeline for record in records if record.pipeline})
    if pipelines:
        count = sum(1 for record in records if record.pipeline)
        shown = ", ".join(pipelines[:_MOST_NAMED]) + (" ..." if len(pipelines) > _MOST_NAMED else "")
        output.note(
            f"{count} of them belong to {len(pipelines)} pipelines, which stay as they ended; "
            f"`gpuflow resume PIPELINE` runs all the rest: {shown}"
        )


def _retry_one(app: GPUFlow, task_id: str, *, as_json: bool) -> int:
    from gpuflow import client
    from gpuflow.cli import output

    handle = client.get(task_id, app=app)
    if isinstance(handle, client.PipelineRun):
        raise bad_input(f"{task_id} is a pipeline; `gpuflow resume {task_id}` runs what is not done of it")
    queued = handle.retry()
    record = handle.record()
    if as_json:
        output.emit_json({"id": task_id, "queued": queued, "state": str(record.state)})
    elif queued:
        output.line(f"{task_id} is queued again in {record.queue}")
        if record.pipeline:
            output.note(
                f"it belongs to pipeline {record.pipeline}; `gpuflow resume {record.pipeline}` runs all the rest"
            )
    else:
        output.note(
            f"gpuflow: {task_id} is {record.state}; only a task that failed, died or was cancelled is tried again"
        )
    return DONE if queued else FAILED
