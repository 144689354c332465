"""`gpuflow resume`: goes on with a pipeline, on the fleet or, if there is none, on a local cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gpuflow.cli.errors import DONE, bad_input, interrupted
from gpuflow.cli.options import json_option

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.client import PipelineRun


@click.command(short_help="Run what is not done of a pipeline.")
@click.argument("pipeline_id", metavar="PIPELINE")
@click.option("--wait", is_flag=True, help="Show its progress and wait for its end (always so without a fleet).")
@json_option
def resume(pipeline_id: str, wait: bool, as_json: bool) -> int:
    """Run what is not done of a pipeline that failed, was cancelled, or was interrupted.

    With REDIS_URL, or a running `gpuflow up`, it goes on there. Otherwise a local cluster is started as `gpuflow run`
    does, and ends with the pipeline.
    """
    from gpuflow.cli.session import connected
    from gpuflow.settings import Settings

    settings = Settings.load()
    with connected(settings) as app:
        handle = _pipeline(app, pipeline_id)
        if settings.redis_url or _workers(app):
            return _on_fleet(app, handle, wait=wait, as_json=as_json)
    from gpuflow.cli.run import run_local

    def start(local: GPUFlow) -> PipelineRun:
        again = _pipeline(local, pipeline_id)
        _say(again)
        return again

    return run_local(start, as_json=as_json)


def _on_fleet(app: GPUFlow, handle: PipelineRun, *, wait: bool, as_json: bool) -> int:
    from gpuflow.cli import output, summary, watch

    verdict = _say(handle)
    if not wait:
        if as_json:
            output.emit_json({"id": handle.id, "verdict": verdict})
        return DONE
    try:
        watch.show(app, handle, on_stderr=True, since=time.time() - 1)
    except KeyboardInterrupt as error:
        output.note(watch.kept_going(handle.id))
        return interrupted(error)
    if as_json:
        output.emit_json(summary.document(handle))
    else:
        summary.show(handle)
    return watch.verdict(handle)


def _say(handle: PipelineRun) -> str:
    from gpuflow.cli import output

    verdict = handle.resume()
    output.note(
        {
            "resumed": f"{handle.id} goes on with what is not done",
            "running": f"{handle.id} had not ended; it goes on",
            "succeeded": f"{handle.id} has succeeded; nothing is left to do",
        }[verdict]
    )
    return verdict


def _pipeline(app: GPUFlow, pipeline_id: str) -> PipelineRun:
    from gpuflow import client

    handle = client.get(pipeline_id, app=app)
    if not isinstance(handle, client.PipelineRun):
        raise bad_input(f"{pipeline_id} is a task; `gpuflow retry {pipeline_id}` queues it again")
    return handle


def _workers(app: GPUFlow) -> bool:
    """Whether a live worker could take the pipeline's stages."""
    from gpuflow.client import reachable
    from gpuflow.fleet.registry import Fleet

    with reachable():
        there, unreadable = Fleet(app.redis, app.keys).readable()
        return bool(unreadable) or any(not worker.is_gone for worker in there)
