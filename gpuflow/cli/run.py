"""`gpuflow run`: a template on a local cluster that lives as long as the command."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from gpuflow.cli.errors import interrupted
from gpuflow.cli.options import include_option, json_option, load_template, modules_of, show_warnings, template_options
from gpuflow.errors import GPUFlowError

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.client import PipelineRun
    from gpuflow.cluster import LocalCluster
    from gpuflow.spec import Template


@click.command(short_help="Run a template here, with everything embedded.")
@template_options
@click.option("--keep", is_flag=True, help="Leave the local cluster up at the end, until Ctrl-C.")
@click.option("--workers", default=1, type=click.IntRange(1, 64), metavar="N", help="Local workers (default 1).")
@click.option("--max-jobs", type=click.IntRange(1, 1024), metavar="N", help="Most child processes of a worker at once.")
@include_option
@json_option
def run(
    source: str,
    overrides: tuple[str, ...],
    labels: tuple[str, ...],
    keep: bool,
    workers: int,
    max_jobs: int | None,
    include: tuple[str, ...],
    as_json: bool,
) -> int:
    """Run a template here: an embedded broker (unless REDIS_URL is set), a worker, live progress, the results.

    FILE is a path, `-` for stdin, or a shipped name such as quickstart. Ctrl-C stops everything; what is done is kept,
    and `gpuflow resume` goes on with the rest.
    """
    template = kept_here(load_template(source, overrides, labels))
    show_warnings(template)

    def start(app: GPUFlow) -> PipelineRun:
        from gpuflow.client import submit_pipeline
        from gpuflow.settings import Settings

        # On a broker of our own nobody else will come: what these workers cannot serve would wait for ever.
        return submit_pipeline(template, fail_fast=not Settings.load().redis_url, app=app)

    own = modules_of(include)
    return run_local(start, workers=workers, max_jobs=max_jobs, include=own, keep=keep, as_json=as_json)


def kept_here(template: Template) -> Template:
    """Return the template for a cluster of this command: results that name no place stay in the results folder.

    Where this machine knows a store of its fleet, they go there.
    """
    from gpuflow.cli.output import note
    from gpuflow.settings import Settings
    from gpuflow.spec.results_out import keep_results

    settings = Settings.load()
    if settings.store_url or settings.gateway_url:
        return template
    kept, names = keep_results(template)
    if names:
        note(f"results of {', '.join(names)} stay in {settings.results_dir}: their http destination names no url")
    return kept


def run_local(
    start: Callable[[GPUFlow], PipelineRun],
    *,
    workers: int = 1,
    max_jobs: int | None = None,
    include: Sequence[str] = (),
    keep: bool = False,
    as_json: bool = False,
) -> int:
    """Bring up a local cluster, `start` a pipeline on it, show it to its end, print the results; return the exit code.

    Nothing of the cluster is left afterwards, however it ends.
    """
    from gpuflow.cli.output import note
    from gpuflow.cli.session import signals_interrupt
    from gpuflow.cluster import LocalCluster
    from gpuflow.process_guard import guard_process
    from gpuflow.settings import Settings

    handle: PipelineRun | None = None
    settings = Settings.load()
    guard_process(settings.umask_bits)
    cluster = LocalCluster(settings, workers=workers, max_jobs=max_jobs, include=include, most_ends=3, note=note)
    with signals_interrupt():
        try:
            with cluster:
                try:
                    handle = _started(cluster, start)
                    code = _shown(cluster, handle, as_json=as_json)
                    if keep:
                        _keep(cluster)
                except KeyboardInterrupt:
                    note(_stopping(handle))
                    raise
        except KeyboardInterrupt as error:
            return interrupted(error)
    return code


def _started(cluster: LocalCluster, start: Callable[[GPUFlow], PipelineRun]) -> PipelineRun:
    from gpuflow.cli.output import note
    from gpuflow.cli.session import app_for

    note("starting a local worker ..." if len(cluster.worker_ids) == 1 else "starting local workers ...")
    # The worker takes longer to start than the app to load: both at once.
    app = app_for(cluster.settings)
    cluster.wait_ready()
    handle = start(app)
    note(f"pipeline {handle.id}")
    for other in app.pipelines.recent() if cluster.embedded else ():
        if not other.state.final and other.id != handle.id:
            note(f"{other.name} ({other.id}) had not ended and goes on too; `gpuflow cancel {other.id}` ends it")
    return handle


def _shown(cluster: LocalCluster, handle: PipelineRun, *, as_json: bool) -> int:
    from gpuflow.cli import summary as results
    from gpuflow.cli import watch
    from gpuflow.cli.output import emit_json

    watch.show(handle.app, handle, on_stderr=as_json, since=time.time() - 1, tick=cluster.tend)
    if as_json:
        emit_json(results.document(handle))
    else:
        results.show(handle)
    return watch.verdict(handle)


def _keep(cluster: LocalCluster) -> None:
    from gpuflow.cli.output import note

    note("the local cluster stays up; Ctrl-C stops it")
    while True:
        cluster.tend()
        time.sleep(0.5)


def _stopping(handle: PipelineRun | None) -> str:
    if handle is None:
        return "stopping; nothing was submitted"
    with contextlib.suppress(GPUFlowError):
        if handle.record().state.final:
            return "stopping"
    return f"stopping; resume with `gpuflow resume {handle.id}`"
