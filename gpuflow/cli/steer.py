"""`gpuflow cancel` and `gpuflow retry`."""

from __future__ import annotations

import click

from gpuflow.cli.errors import DONE, FAILED, bad_input
from gpuflow.cli.options import json_option


@click.command(short_help="Cancel a pipeline or task.")
@click.argument("record_id", metavar="ID")
@json_option
def cancel(record_id: str, as_json: bool) -> int:
    """Cancel a task, or all of a pipeline that has not ended. What has ended is kept."""
    from gpuflow import client
    from gpuflow.cli import output
    from gpuflow.cli.session import connected

    with connected() as app:
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


@click.command(short_help="Queue an ended task again.")
@click.argument("task_id", metavar="ID")
@json_option
def retry(task_id: str, as_json: bool) -> int:
    """Queue a task that failed, died or was cancelled again, under its id."""
    from gpuflow import client
    from gpuflow.cli import output
    from gpuflow.cli.session import connected

    with connected() as app:
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
