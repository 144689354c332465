"""`gpuflow submit`: a template for the fleet; prints the id."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from gpuflow.cli.errors import DONE, interrupted
from gpuflow.cli.options import json_option, load_template, show_warnings, template_options

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.spec import Template


@click.command(short_help="Hand a template to the fleet.")
@template_options
@click.option("--wait", is_flag=True, help="Show its progress and wait for its end.")
@click.option(
    "--target",
    type=click.Choice(["worker", "local", "auto"]),
    help="worker: the fleet; local: here, as `gpuflow run`; auto: the fleet if a live worker can serve it, else here."
    "  [default: the template's `target`, else worker]",
)
@click.option("--fail-fast", is_flag=True, help="Refuse, with exit code 1, what no live worker can serve.")
@click.option("--idempotency-key", metavar="K", help="The same key again gives the first id and runs nothing.")
@json_option
def submit(
    source: str,
    overrides: tuple[str, ...],
    labels: tuple[str, ...],
    wait: bool,
    target: str | None,
    fail_fast: bool,
    idempotency_key: str | None,
    as_json: bool,
) -> int:
    """Hand a template to the fleet and print its id. FILE is a path, `-` for stdin, or a shipped name."""
    template = load_template(source, overrides, labels)
    show_warnings(template)
    target = target or _target_of(template)
    if target == "local" or (target == "auto" and not _served(template)):
        from gpuflow.cli.run import kept_here, run_local
        from gpuflow.client import submit_pipeline

        template = kept_here(template)
        return run_local(
            lambda app: submit_pipeline(template, idempotency_key=idempotency_key, app=app), as_json=as_json
        )
    from gpuflow.cli.session import connected

    with connected(stored=False) as app:
        _warn(app, template, fail_fast=fail_fast)
        handle = _send(app, template, idempotency_key)
        return _told(app, handle, wait=wait, as_json=as_json)


def _target_of(template: Template) -> str:
    """Return where a template says that it is to run: all of its stages in one place, which is checked."""
    return str(template.stages[0].spec.get("target") or "worker")


def _send(app: GPUFlow, template: Template, key: str | None) -> Any:
    from gpuflow.client import submit as submit_task
    from gpuflow.client import submit_pipeline

    split = any(stage.is_split for stage in template.stages)
    send = submit_pipeline if template.is_pipeline or split else submit_task
    return send(template, idempotency_key=key, app=app)


def _told(app: GPUFlow, handle: Any, *, wait: bool, as_json: bool) -> int:
    from gpuflow.cli import watch
    from gpuflow.cli.output import emit_json, line, note

    if not as_json:
        line(handle.id)
    if not wait:
        if as_json:
            emit_json({"id": handle.id})
        return DONE
    try:
        watch.show(app, handle, on_stderr=True, since=time.time() - 1)
    except KeyboardInterrupt as error:
        note(watch.kept_going(handle.id))
        return interrupted(error)
    if as_json:
        emit_json(handle.status())
    return watch.verdict(handle)


def _warn(app: GPUFlow, template: Template, *, fail_fast: bool) -> None:
    """Tell on stderr what no live worker can serve; with `fail_fast` raise NoCapableWorker."""
    from gpuflow.cli.output import note
    from gpuflow.submission_checks import problems_at_submit

    for problem in problems_at_submit(app, template, fail_fast=fail_fast):
        note(f"warning: {problem}")


def _served(template: Template) -> bool:
    """Whether a fleet can be reached and live workers of it can serve the template."""
    from redis.exceptions import RedisError

    from gpuflow.cli.session import connected
    from gpuflow.errors import BrokerUnavailable
    from gpuflow.submission_checks import can_serve

    try:
        with connected(stored=False) as app:
            return can_serve(app, template)
    except (BrokerUnavailable, RedisError):
        return False
