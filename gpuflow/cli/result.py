"""`gpuflow result`: what a run has given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuflow.cli.errors import DONE, FAILED
from gpuflow.cli.options import json_option

if TYPE_CHECKING:
    from gpuflow.client import PipelineRun, Task


@click.command(short_help="Show the result of a pipeline or task.")
@click.argument("record_id", metavar="ID")
@json_option
def result(record_id: str, as_json: bool) -> int:
    """Show the result of a task, or of each stage of a pipeline. Exit code 1 while there is none."""
    from gpuflow import client
    from gpuflow.cli.session import connected

    with connected() as app:
        handle = client.get(record_id, app=app)
        if isinstance(handle, client.PipelineRun):
            return _of_pipeline(handle, as_json)
        return _of_task(handle, as_json)


def _of_pipeline(handle: PipelineRun, as_json: bool) -> int:
    from gpuflow.cli import output, summary

    if as_json:
        found: dict[str, Any] = summary.document(handle)
        output.emit_json(found)
    else:
        summary.show(handle, every_row=True)
    return _told(handle)


def _of_task(handle: Task, as_json: bool) -> int:
    from gpuflow.cli import output
    from gpuflow.cli.summary import StageSummary, items_grid, print_grid, stage_lines

    record, found = handle.record(), handle.result
    if as_json:
        output.emit_json(found)
        return _told(handle)
    if found is not None:
        shown = found if isinstance(found, dict) else {"value": found}
        stage = StageSummary(name=record.name, state=str(record.state), task_type=record.task_type, result=shown)
        for text in stage_lines(stage):
            output.line(text)
        if stage.items:
            print_grid(items_grid(stage, None), handle.id)
    return _told(handle)


def _told(handle: PipelineRun | Task) -> int:
    """Return 0 for a run that has succeeded; else say why there is no result, and return 1."""
    from gpuflow.cli import output, watch

    record = handle.record()
    if str(record.state) == "SUCCEEDED":
        return DONE
    if not record.state.final:
        waits = f"`gpuflow status {handle.id} --watch` waits for its end"
        output.note(f"gpuflow: {handle.id} has not ended, it is {record.state}; {waits}")
        return FAILED
    return watch.verdict(handle)
